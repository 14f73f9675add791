// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "device.cuh"

namespace fl_lightning::cuda {
namespace {

template <std::int64_t kBytes>
struct Part {
  unsigned char bytes[kBytes];
};

template <std::int64_t kBytes>
__global__ void write_part(const __grid_constant__ Part<kBytes> part, std::int64_t count, unsigned char* to) {
  const std::int64_t first = blockIdx.x * kCopyEach, end = first + kCopyEach < count ? first + kCopyEach : count;
  for (std::int64_t i = first + threadIdx.x; i < end; i += blockDim.x) to[i] = part.bytes[i];
}

template <std::int64_t kBytes>
std::int64_t launch_part(const char* op, const unsigned char* from, std::int64_t left, unsigned char* to,
                         const Context& context) {
  Part<kBytes> part = {};
  const std::int64_t count = std::min(kBytes, left);
  std::memcpy(part.bytes, from, static_cast<std::size_t>(count));
  launch(op, write_part<kBytes>, (count + kCopyEach - 1) / kCopyEach, kCopyThreads, context, part, count, to);
  return count;
}

bool takes_large_parts() {
#if CUDART_VERSION >= 12010
  int driver = 0;
  return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12010;
#else
  return false;
#endif
}

}  // namespace

void copy_in(const char* op, const void* host, std::int64_t bytes, void* to, Context context) {
  const auto* from = static_cast<const unsigned char*>(host);
  auto* own = static_cast<unsigned char*>(to);
  for (std::int64_t first = 0; first < bytes;) {
    const std::int64_t left = bytes - first;
    first += left > kCopyPart && takes_large_parts()
                 ? launch_part<kLargeCopyPart>(op, from + first, left, own + first, context)
                 : launch_part<kCopyPart>(op, from + first, left, own + first, context);
  }
}

}  // namespace fl_lightning::cuda
