// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "device.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr std::int64_t kPart = 3584;  // kernel arguments may take 4 KB in all
constexpr int kThreads = 128;

struct Part {
  unsigned char bytes[kPart];
};

__global__ void write_part(const __grid_constant__ Part part, std::int64_t count, unsigned char* to) {
  for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) to[i] = part.bytes[i];
}

}  // namespace

void copy_in(const char* op, const void* host, std::int64_t bytes, void* to, Context context) {
  const auto* from = static_cast<const unsigned char*>(host);
  for (std::int64_t first = 0; first < bytes; first += kPart) {
    Part part = {};
    const std::int64_t count = std::min(kPart, bytes - first);
    std::memcpy(part.bytes, from + first, static_cast<std::size_t>(count));
    launch(op, write_part, 1, kThreads, context, part, count, static_cast<unsigned char*>(to) + first);
  }
}

}  // namespace fl_lightning::cuda
