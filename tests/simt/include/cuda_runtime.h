// SPDX-License-Identifier: Apache-2.0
// Stands in for CUDA's header of this name when device code is compiled for the processor: the words and functions
// that the kernels use, and no others.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>

#include "../simt.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define SHARED(T, name, n) \
  static char name##_tag;  \
  const simt::Shared<T> name(&name##_tag, #name, n)

#define SHARED_OF_LAUNCH(T, name) \
  static char name##_tag;         \
  const simt::Shared<T> name(&name##_tag, #name, simt::launch_bytes() / sizeof(T))

#define SHARED_ADDRESS(array) simt::address_of(array)
#define COPY_ASYNC_4(to, from) simt::copy_async(4, to, from)
#define COPY_ASYNC_16(to, from) simt::copy_async(16, to, from)
#define COPY_COMMIT() simt::copy_commit()
#define COPY_WAIT(groups) simt::copy_wait(groups)
#define FENCE_TENSOR_CORES() simt::fence_tensor_cores()
#define WGMMA_BEGIN(d) simt::wgmma_begin()
#define WGMMA(n, depth, types, tail, d, a, b, more, rows, others) simt::wgmma(n, types, d, a, b, more, rows, others)
#define WGMMA_REGISTERS(n, depth, types, d, a, b, more, others) simt::wgmma(n, types, d, a, b, more, others)
#define WGMMA_END(d) simt::wgmma_end()
#define WGMMA_WAIT(d) simt::wgmma_wait()

#define MMA(shape, types, d, a, b, c) simt::mma(shape, types, d, a, b, c)

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
template <class T>
void __stcs(T* to, T value) {
  *to = value;
}
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

using std::isfinite;
using std::isnan;

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  simt::barrier(file, line);
}
int __syncthreads_or(int value, const char* file = __builtin_FILE(), int line = __builtin_LINE());
inline void __syncwarp(unsigned mask = 0xffffffffu, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  simt::exchange(mask, 0, file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int other, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  simt::exchange(mask, simt::bits_of(value), file, line);
  return simt::peer_as<T>(static_cast<int>(threadIdx.x % simt::kWarp) ^ other);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  simt::exchange(mask, simt::bits_of(value), file, line);
  return simt::peer_as<T>(lane);
}
inline unsigned __ballot_sync(unsigned mask, int value, const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
  simt::exchange(mask, value != 0, file, line);
  unsigned bits = 0;
  for (int lane = 0; lane < simt::kWarp; ++lane) bits |= static_cast<unsigned>(simt::peer(lane)) << lane;
  return bits;
}
inline int __syncthreads_or(int value, const char* file, int line) {
  static char tag;
  const simt::Shared<int> any(&tag, "__syncthreads_or", 1);
  if (threadIdx.x == 0) any[0] = 0;
  simt::barrier(file, line);
  for (unsigned warp = 0; warp < blockDim.x / simt::kWarp; ++warp) {  // one warp after the other
    if (threadIdx.x / simt::kWarp == warp && __ballot_sync(0xffffffffu, value, file, line) &&
        threadIdx.x % simt::kWarp == 0) {
      any[0] = 1;
    }
    simt::barrier(file, line);
  }
  const int result = any[0];
  simt::barrier(file, line);
  return result;
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> (shift & 31u));
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline double __longlong_as_double(long long bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline long long __double_as_longlong(double value) {
  long long bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
// Which of two numbers of 16 bits it is, in each half of a pair.
template <class Pair, class Float>
Pair by_two(Pair a, Pair b, Float wide, float (*choose)(float, float)) {
  const auto one = [&](auto x, auto y) {
    const float chosen = choose(wide(x), wide(y));
    return chosen == wide(x) || (std::isnan(chosen) && std::isnan(wide(x))) ? x : y;
  };
  return {one(a.x, b.x), one(a.y, b.y)};
}
inline float larger_or_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b); }
// To the nearest number with `digits` bits after the leading one and no exponent below `least`; ties to even.
inline double round_to(double x, int digits, int least) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int unit = std::max(std::ilogb(x), least) - digits;
  return std::ldexp(std::nearbyint(std::ldexp(x, -unit)), unit);
}

using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNoKernelImageForDevice = 209
};
inline cudaError_t& simt_last_error() {
  static cudaError_t error = cudaSuccess;
  return error;
}
inline const char* cudaGetErrorString(cudaError_t) { return "invalid configuration argument"; }
inline cudaError_t cudaGetLastError() { return std::exchange(simt_last_error(), cudaSuccess); }
#define CUDART_VERSION 12010
inline int simt_driver = CUDART_VERSION, simt_launches = 0;
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = simt_driver;
  return cudaSuccess;
}
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
inline int simt_capability = 8;  // of the device that is stood in for
inline int simt_optin_bytes() { return (simt_capability < 8 ? 64 : simt_capability < 9 ? 163 : 227) << 10; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? simt_capability : simt_optin_bytes();
  return cudaSuccess;
}
struct cudaFuncAttributes {
  int numRegs;
};
// Of a kernel for Hopper alone: elsewhere it is empty.
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel) {
  attributes->numRegs = simt_capability == 9 ? 128 : 8;
  return cudaSuccess;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
inline std::map<const void*, int> simt_allowed;  // what kernels may have beyond 48 KB
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  if (bytes + 16 > simt_optin_bytes()) return simt_last_error() = cudaErrorInvalidValue;  // beside its own arrays
  simt_allowed[reinterpret_cast<const void*>(kernel)] = bytes;
  return cudaSuccess;
}
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
};
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  if (config->gridDim.x == 0 || config->blockDim.x > simt::kMaxThreads) {
    return simt_last_error() = cudaErrorInvalidConfiguration;
  }
  const auto allowed = simt_allowed.find(reinterpret_cast<const void*>(kernel));
  const bool asked = allowed != simt_allowed.end() && allowed->second > simt::kSharedBytes;
  const int most = asked ? allowed->second : simt::kSharedBytes;
  if (config->dynamicSmemBytes > static_cast<std::size_t>(most)) return simt_last_error() = cudaErrorInvalidValue;
  ++simt_launches;
  const auto body = [&] { kernel(static_cast<Parameters>(arguments)...); };
  simt::run(config->gridDim.x, config->blockDim.x, std::ref(body), config->dynamicSmemBytes,
            asked ? simt_optin_bytes() : most);
  return cudaSuccess;
}
