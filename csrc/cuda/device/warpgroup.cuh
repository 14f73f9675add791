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
// A shared array that begins where a pattern of 8 rows of 128 bytes does.
#define SHARED_PATTERNS(T, name, n) __shared__ __align__(1024) T name[n]
#define SHARED_ADDRESS(pointer) static_cast<unsigned>(__cvta_generic_to_shared(pointer))

// Copies 4, 8 or 16 bytes that are aligned as such from device to shared memory, or zeros where any is false.
#define COPY_ASYNC_4(to, from, any) COPY_ASYNC("ca.shared.global", "4", to, from, any ? 4 : 0)
#define COPY_ASYNC_8(to, from, any) COPY_ASYNC("ca.shared.global", "8", to, from, any ? 8 : 0)
#define COPY_ASYNC_16(to, from, any) COPY_ASYNC("cg.shared.global.L2::128B", "16", to, from, any ? 16 : 0)
#define COPY_ASYNC(kind, bytes, to, from, read)                                                               \
  asm volatile("cp.async." kind " [%0], [%1], " bytes ", %2;" ::"r"(SHARED_ADDRESS(to)), "l"(from), "r"(read) \
               : "memory")
// Ends a group of copies; waits until at most so many groups of this thread are under way.
#define COPY_COMMIT() asm volatile("cp.async.commit_group;" ::: "memory")
#define COPY_WAIT(groups) asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory")
// Behind the next barrier, tensor cores see what this thread has put into shared memory.
#define FENCE_TENSOR_CORES() asm volatile("fence.proxy.async.shared::cta;" ::: "memory")

// d = a[0..3] x + a[4..7] y + a[8..11] x + a[12..15] y, by a whole warpgroup: each time 64 rows of 8 columns, which lie
// in registers, with n rows that a descriptor names, x or y. It is done when it returns.
#define WGMMA(n, d, a, x, y) WGMMA_N##n(d, a, x, y)
#define WGMMA_N40(d, a, x, y) WGMMA_STEPS("40", WGMMA_LIST_20, WGMMA_20(d), a, x, y)
#define WGMMA_N64(d, a, x, y) WGMMA_STEPS("64", WGMMA_LIST_32, WGMMA_32(d), a, x, y)
#define WGMMA_N80(d, a, x, y) WGMMA_STEPS("80", WGMMA_LIST_40, WGMMA_40(d), a, x, y)
#define WGMMA_N104(d, a, x, y) WGMMA_STEPS("104", WGMMA_LIST_52, WGMMA_52(d), a, x, y)
#define WGMMA_STEPS(n, list, d, a, x, y)                                                              \
  asm volatile(WGMMA_START WGMMA_PAIR(n, list, "%0,%1,%2,%3", "%4,%5,%6,%7", "none")                  \
                   WGMMA_PAIR(n, list, "%8,%9,%10,%11", "%12,%13,%14,%15", "more") WGMMA_DONE         \
               : WGMMA_IN(a, 0), WGMMA_IN(a, 4), WGMMA_IN(a, 8), WGMMA_IN(a, 12), "+l"(x), "+l"(y), d \
               :                                                                                      \
               : "memory")
#define WGMMA_START \
  "{\n.reg .pred none, more;\nsetp.ne.b32 none, 0, 0;\nsetp.eq.b32 more, 0, 0;\nwgmma.fence.sync.aligned;\n"
#define WGMMA_DONE "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n}"
#define WGMMA_PAIR(n, list, a, b, first) WGMMA_STEP(n, list, a, "%16", first) WGMMA_STEP(n, list, b, "%17", "more")
#define WGMMA_STEP(n, list, a, descriptor, add) \
  "wgmma.mma_async.sync.aligned.m64n" n "k8.f32.tf32.tf32 {" list "}, {" a "}, " descriptor ", " add ", 1, 1;\n"
// Inputs stand among the outputs, and before them, so that their numbers are the same whatever n.
#define WGMMA_IN(a, o) "+r"(a[o]), "+r"(a[o + 1]), "+r"(a[o + 2]), "+r"(a[o + 3])
#define WGMMA_4(d, o) "=f"(d[o]), "=f"(d[o + 1]), "=f"(d[o + 2]), "=f"(d[o + 3])
#define WGMMA_12(d, o) WGMMA_4(d, o), WGMMA_4(d, o + 4), WGMMA_4(d, o + 8)
#define WGMMA_20(d) WGMMA_12(d, 0), WGMMA_4(d, 12), WGMMA_4(d, 16)
#define WGMMA_32(d) WGMMA_20(d), WGMMA_12(d, 20)
#define WGMMA_40(d) WGMMA_32(d), WGMMA_4(d, 32), WGMMA_4(d, 36)
#define WGMMA_52(d) WGMMA_40(d), WGMMA_12(d, 40)
#define WGMMA_LIST_20 "%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37"
#define WGMMA_LIST_32 WGMMA_LIST_20 ",%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49"
#define WGMMA_LIST_40 WGMMA_LIST_32 ",%50,%51,%52,%53,%54,%55,%56,%57"
#define WGMMA_LIST_52 WGMMA_LIST_40 ",%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69"
#endif

namespace fl_lightning::cuda {

constexpr int kWarpgroup = 128, kWarpgroupRows = 64;  // threads of a warpgroup, and the rows that it has

// Rows of 128 bytes as tensor cores read them: in patterns of 8 rows, whose runs of 16 bytes have changed places.
constexpr int kSpan = 32;  // words of 4 bytes
__device__ inline int word_at(int row, int column) { return row * kSpan + (column ^ row % 8 * 4); }

// Of such rows, from the address on: the distance of patterns is 1024 bytes, and their kind 1 (128 bytes).
__device__ inline std::uint64_t rows_from(unsigned address) {
  return std::uint64_t{address >> 4 & 0x3fffu} | std::uint64_t{1} << 16 | std::uint64_t{1024 >> 4} << 32 |
         std::uint64_t{1} << 62;
}

template <int kRows>
__device__ inline void wgmma(float (&d)[kRows / 2], unsigned (&a)[16], std::uint64_t x, std::uint64_t y) {
#ifdef HAS_WGMMA
  static_assert(kRows == 40 || kRows == 64 || kRows == 80 || kRows == 104);
  if constexpr (kRows == 40) {
    WGMMA(40, d, a, x, y);
  } else if constexpr (kRows == 64) {
    WGMMA(64, d, a, x, y);
  } else if constexpr (kRows == 80) {
    WGMMA(80, d, a, x, y);
  } else {
    WGMMA(104, d, a, x, y);
  }
#endif
}

}  // namespace fl_lightning::cuda
