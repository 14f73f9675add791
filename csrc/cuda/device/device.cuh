// SPDX-License-Identifier: Apache-2.0
// What all kernels share: element types, launches, sums and minima over a warp.
//
// tests/simt compiles the same files for the processor, with headers of its own in place of CUDA's. Hence the launch
// without <<<>>>, and SHARED, which declares a shared array here and one that detects races there.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "../../tiles.h"

#ifndef SHARED
#define SHARED(T, name, n) __shared__ __align__(16) T name[n]
#define SHARED_OF_LAUNCH(T, name) extern __shared__ __align__(16) T name[]  // as large as the launch says
#endif
#ifndef MMA  // d = a b + c, by the whole warp; PTX ISA, "Matrix Fragments for mma", says which lane holds what
#define MMA(shape, types, d, a, b, c)                  \
  asm("mma.sync.aligned." shape ".row.col.f32." types  \
      ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "   \
      "{%10,%11,%12,%13};"                             \
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]))
#endif

namespace fl_lightning::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;

// Numbers are read as what they are summed in: products of half-precision numbers are exact in float32.
template <class To>
__host__ __device__ inline To widen(float x) {
  return x;
}
template <class To>
__host__ __device__ inline To widen(double x) {
  return static_cast<To>(x);
}
template <class To>
__host__ __device__ inline To widen(__half x) {
  return __half2float(x);
}
template <class To>
__host__ __device__ inline To widen(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

// One rounding, from float64 to the type of the result.
template <class T>
__host__ __device__ inline T narrow(double x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __double2half(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __double2bfloat16(x);
  } else {
    return static_cast<T>(x);
  }
}

// Calls function with a value of the type that dtype names.
template <class F>
void with_type(DType dtype, F&& function) {
  switch (dtype) {
    case DType::f64:
      return function(double{});
    case DType::f32:
      return function(float{});
    case DType::f16:
      return function(__half{});
    case DType::bf16:
      return function(__nv_bfloat16{});
  }
  throw std::runtime_error("fl_lightning: unknown dtype " + std::to_string(static_cast<int>(dtype)));
}

// Calls function with the first of the sizes that is enough for so many rows; false: none is.
template <int... kSizes, class F>
bool with_least(std::int64_t rows, Sizes<kSizes...>, F&& function) {
  return ((rows <= kSizes ? (function(std::integral_constant<int, kSizes>{}), true) : false) || ...);
}

// The floating-point type to multiply in: float64 rows are never narrowed.
inline bool wide(Matrix matrix) { return matrix.dtype == DType::f64; }

// The most shared memory that a launch on this device may ask for, beside up to kDeclaredBytes of the kernel's own.
constexpr int kDeclaredBytes = 256;
inline int most_shared_bytes() {
  int device = 0, bytes = 0;
  const bool known = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess;
  return (known && bytes > kDeclaredShared ? bytes : kDeclaredShared) - kDeclaredBytes;
}

// Queues a kernel on the context's stream, with so many bytes for its SHARED_OF_LAUNCH.
template <class... Parameters, class... Arguments>
void launch_with_shared(const char* op, void (*kernel)(Parameters...), std::int64_t blocks, int threads,
                        std::int64_t bytes, const Context& context, Arguments&&... arguments) {
  if (blocks <= 0) return;
  if (blocks > INT32_MAX) {
    throw std::runtime_error(std::string("fl_lightning::") + op + " needs " + std::to_string(blocks) +
                             " blocks, more than a CUDA launch takes");
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  config.stream = static_cast<cudaStream_t>(context.stream);
  cudaError_t error = cudaSuccess;
  // The most there is, whatever this launch takes: other threads may be launching the same kernel.
  if (bytes > 0) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared_bytes());
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  if (error != cudaSuccess) {
    cudaGetLastError();  // or the next call that has nothing to do with this one would report it
    const bool foreign = error == cudaErrorNoKernelImageForDevice;
    throw std::runtime_error(std::string("fl_lightning::") + op + ": CUDA launch failed: " + cudaGetErrorString(error) +
                             (foreign ? " (built for other GPUs; FL_LIGHTNING_DISABLE_EXT=1 runs pure torch)" : ""));
  }
}

template <class... Parameters, class... Arguments>
void launch(const char* op, void (*kernel)(Parameters...), std::int64_t blocks, int threads, const Context& context,
            Arguments&&... arguments) {
  launch_with_shared(op, kernel, blocks, threads, 0, context, std::forward<Arguments>(arguments)...);
}

// Scratch memory for count elements, for as long as the queued work needs it.
template <class T>
T* scratch(const Context& context, std::int64_t count) {
  return static_cast<T*>(
      context.allocate((count > 0 ? count : 1) * static_cast<std::int64_t>(sizeof(T)), context.owner));
}

// Along the binary tree whose leaves are the lanes. The same bits in every lane, whatever their order in time.
__device__ inline double warp_sum(double x) {
  for (int mask = 1; mask < kWarp; mask *= 2) x += __shfl_xor_sync(kFullWarp, x, mask);
  return x;
}

// The sum of term(0) to term(count - 1). Every warp adds up by itself: the same bits everywhere, and no barrier.
template <class Term>
__device__ inline double sum_of(int count, Term term) {
  double total = 0.0;
  for (int i = threadIdx.x % kWarp; i < count; i += kWarp) total += term(i);
  return warp_sum(total);
}

constexpr unsigned kTf32Bits = 0xffffe000u;  // those of a float32 number that TF32 has

// d: c and the products of 16 rows with 8 others, over 8 columns in TF32, or 16 of numbers of 16 bits.
template <class T>
__device__ inline void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4]) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, float>) {
    MMA("m16n8k8", "tf32.tf32", d, a, b, c);
  } else if constexpr (std::is_same_v<T, __half>) {
    MMA("m16n8k16", "f16.f16", d, a, b, c);
  } else {
    MMA("m16n8k16", "bf16.bf16", d, a, b, c);
  }
#else
  __trap();  // the host asks the device first
#endif
}

// A number and where it stands; of equal numbers the first counts.
struct Best {
  double value;
  int index;
};

__device__ inline Best least(Best a) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const double value = __shfl_xor_sync(kFullWarp, a.value, mask);
    const int index = __shfl_xor_sync(kFullWarp, a.index, mask);
    if (value < a.value || (value == a.value && index < a.index)) a = {value, index};
  }
  return a;
}

}  // namespace fl_lightning::cuda
