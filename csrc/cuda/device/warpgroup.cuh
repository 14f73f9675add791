// SPDX-License-Identifier: Apache-2.0
// Hopper's products by warpgroups (wgmma, of sm_90a alone), and copies to shared memory that take no registers.
//
// PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate", says which thread holds what. tests/simt has its
// own of all that is in capitals.
#pragma once

#include "device.cuh"

// A kernel that uses these has a body where it is compiled for sm_90a, and none elsewhere.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA
#endif

#ifndef WGMMA
#define SHARED_ADDRESS(pointer) static_cast<unsigned>(__cvta_generic_to_shared(pointer))

// Copies 4 or 16 bytes that are aligned as such from device to shared memory.
#define COPY_ASYNC_4(to, from) COPY_ASYNC("ca.shared.global", "4", to, from)
#define COPY_ASYNC_16(to, from) COPY_ASYNC("cg.shared.global.L2::128B", "16", to, from)
#define COPY_ASYNC(kind, bytes, to, from) \
  asm volatile("cp.async." kind " [%0], [%1], " bytes ";" ::"r"(SHARED_ADDRESS(to)), "l"(from) : "memory")
// Ends a group of copies; waits until at most so many groups of this thread are under way.
#define COPY_COMMIT() asm volatile("cp.async.commit_group;" ::: "memory")
#define COPY_WAIT(groups) asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory")
// Behind the next barrier, tensor cores see what this thread has put into shared memory.
#define FENCE_TENSOR_CORES() asm volatile("fence.proxy.async.shared::cta;" ::: "memory")

// d = a b, or with more d += a b, by a whole warpgroup: 64 rows in registers, or that a descriptor names, with n rows
// that another one does. Between WGMMA_BEGIN and WGMMA_WAIT nobody may touch d. Of the tests alone: rows and others are
// how many of the rows hold something.
#define WGMMA_BEGIN(d) (keep_in_registers(d), wgmma_fence())
#define WGMMA(n, depth, types, tail, d, a, b, more, rows, others)                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nwgmma.mma_async.sync.aligned.m64n" #n depth ".f32." types \
               " {" WGMMA_LIST_##n "}, %0, %4, p, 1, 1" tail ";\n}"                                                \
               : "+l"(a), "+r"(more), "+r"(more), "+r"(more), "+l"(b), "+r"(more), WGMMA_SUMS_##n(d))
#define WGMMA_REGISTERS(n, depth, types, d, a, b, more, others)                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nwgmma.mma_async.sync.aligned.m64n" #n depth ".f32." types \
               " {" WGMMA_LIST_##n "}, {%0,%1,%2,%3}, %4, p, 1, 1;\n}"                                             \
               : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]), "+l"(b), "+r"(more), WGMMA_SUMS_##n(d))
#define WGMMA_END(d) (wgmma_commit(), keep_in_registers(d))
#define WGMMA_WAIT(d) (wgmma_wait(), keep_in_registers(d))

#define WGMMA_4(d, o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3])
#define WGMMA_8(d, o) WGMMA_4(d, o), WGMMA_4(d, o + 4)
#define WGMMA_SUMS_16(d) WGMMA_8(d, 0)
#define WGMMA_SUMS_24(d) WGMMA_8(d, 0), WGMMA_4(d, 8)
#define WGMMA_SUMS_32(d) WGMMA_8(d, 0), WGMMA_8(d, 8)
#define WGMMA_SUMS_40(d) WGMMA_SUMS_32(d), WGMMA_4(d, 16)
#define WGMMA_SUMS_56(d) WGMMA_SUMS_32(d), WGMMA_8(d, 16), WGMMA_4(d, 24)
#define WGMMA_SUMS_64(d) WGMMA_SUMS_32(d), WGMMA_8(d, 16), WGMMA_8(d, 24)
#define WGMMA_LIST_16 "%6,%7,%8,%9,%10,%11,%12,%13"
#define WGMMA_LIST_24 WGMMA_LIST_16 ",%14,%15,%16,%17"
#define WGMMA_LIST_32 WGMMA_LIST_24 ",%18,%19,%20,%21"
#define WGMMA_LIST_40 WGMMA_LIST_32 ",%22,%23,%24,%25"
#define WGMMA_LIST_56 WGMMA_LIST_40 ",%26,%27,%28,%29,%30,%31,%32,%33"
#define WGMMA_LIST_64 WGMMA_LIST_56 ",%34,%35,%36,%37"

namespace fl_lightning::cuda {
template <int kCount>
__device__ inline void keep_in_registers(float (&d)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) asm volatile("" : "+f"(d[k])::"memory");
}
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
}  // namespace fl_lightning::cuda
#endif

namespace fl_lightning::cuda {

constexpr int kWarpgroup = 128, kWarpgroupRows = 64;  // threads of a warpgroup, and the rows that it has

// Rows of 128 bytes as tensor cores read them: in patterns of 8 rows, whose runs of 16 bytes have changed places.
constexpr int kSpan = 32, kPatternBytes = 1024;  // words of 4 bytes
__device__ inline int word_at(int row, int column) { return row * kSpan + (column ^ row % 8 * 4); }

// Of such rows, from an address on, the lower half of the descriptor. It counts in 16 bytes: what is added to it moves
// the address. The upper half says that patterns are 1024 bytes apart, and that their kind is 1 (128 bytes).
__device__ inline unsigned rows_from(unsigned address) { return (address >> 4 & 0x3fffu) | 1u << 16; }
constexpr std::uint64_t kPatterns = (std::uint64_t{kPatternBytes >> 4} << 32) | std::uint64_t{1} << 62;

// One instruction on 32 bytes of each row of 16-bit numbers: 16 columns.
template <class T, int kCount>
__device__ inline void wgmma(float (&d)[kCount], unsigned rows_a, unsigned rows_b, int more, int rows, int others) {
#ifdef HAS_WGMMA
  std::uint64_t a = kPatterns | rows_a, b = kPatterns | rows_b;
#define WGMMA_OF(n)                                                      \
  if constexpr (kCount == n / 2 && std::is_same_v<T, __half>) {          \
    WGMMA(n, "k16", "f16.f16", ", 0, 0", d, a, b, more, rows, others);   \
  } else if constexpr (kCount == n / 2) {                                \
    WGMMA(n, "k16", "bf16.bf16", ", 0, 0", d, a, b, more, rows, others); \
  }
  WGMMA_OF(16) WGMMA_OF(24) WGMMA_OF(32) WGMMA_OF(40) WGMMA_OF(56) WGMMA_OF(64)
#undef WGMMA_OF
#endif
}

// One instruction on 8 columns in TF32, with the rows in registers.
template <int kCount>
__device__ inline void wgmma(float (&d)[kCount], unsigned* a, unsigned rows_b, int more, int others) {
#ifdef HAS_WGMMA
  std::uint64_t b = kPatterns | rows_b;
#define WGMMA_OF(n) \
  if constexpr (kCount == n / 2) WGMMA_REGISTERS(n, "k8", "tf32.tf32", d, a, b, more, others);
  WGMMA_OF(16) WGMMA_OF(24) WGMMA_OF(32) WGMMA_OF(40) WGMMA_OF(56) WGMMA_OF(64)
#undef WGMMA_OF
#endif
}

}  // namespace fl_lightning::cuda
