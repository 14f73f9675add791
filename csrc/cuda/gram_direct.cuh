// SPDX-License-Identifier: Apache-2.0
// Gram matrices of up to 16 rows: each thread loads a run of columns of all rows into registers and keeps all pairs.
//
// Every number is loaded once, with nothing between memory and registers.
#pragma once

#include "partials.cuh"

namespace fl_lightning::cuda {

// Adds 2 * kHalf values over the lanes of a warp, kHalf / kMask to each lane. Every step halves what a lane keeps: a sum
// costs two exchanges, not five.
template <int kMask, int kHalf>
__device__ inline void fold(double (&part)[kHalf]) {
  if constexpr (kMask > 0) {
    constexpr int kKept = kHalf / 2;
    const bool upper = threadIdx.x & kMask;
    double kept[kKept];
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const double low = part[k], high = part[k + kKept];
      kept[k] = (upper ? high : low) + __shfl_xor_sync(kFullWarp, upper ? low : high, kMask);
    }
    fold<kMask / 2>(kept);
#pragma unroll
    for (int k = 0; k < kKept; ++k) part[k] = kept[k];
  }
}

// Lane i's sums grow by those of values [i * kSlots, (i + 1) * kSlots) over the warp.
template <int kCount, int kSlots, class Real>
__device__ inline void scatter_sums(const Real (&values)[kCount], double (&sums)[kSlots]) {
  static_assert(kSlots * kWarp >= kCount);
  constexpr int kHalf = kSlots * kWarp / 2;
  const bool upper = threadIdx.x & (kWarp / 2);
  double part[kHalf];
#pragma unroll
  for (int k = 0; k < kHalf; ++k) {
    const Real low = k < kCount ? values[k < kCount ? k : 0] : Real{0};
    const Real high = k + kHalf < kCount ? values[k + kHalf < kCount ? k + kHalf : 0] : Real{0};
    const Real received = __shfl_xor_sync(kFullWarp, upper ? low : high, kWarp / 2);
    part[k] = static_cast<double>(upper ? high : low) + static_cast<double>(received);
  }
  fold<kWarp / 4>(part);
#pragma unroll
  for (int k = 0; k < kSlots; ++k) sums[k] += part[k];
}

constexpr int kDirectThreads = 128;

template <class T, int kRows>
__global__ void __launch_bounds__(kDirectThreads)
    gram_direct(const T* rows, std::int64_t stride, int m, const __grid_constant__ LayerTable table,
                std::int64_t items, double* partial) {
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
  constexpr int kWarps = kDirectThreads / kWarp, kEntries = kRows * (kRows + 1) / 2;
  constexpr int kSlots = (kEntries + kWarp - 1) / kWarp;
  const Item item = find_item(table, blockIdx.x);
  if (item.start >= item.stop) return;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const std::int64_t first = aligned_start(rows, item.start);
  const int width = piece_width(rows, stride, first);

  double total[kSlots] = {};
  std::int64_t column = first + warp * kWarp * kRun<T>;
  while (column < item.stop) {
    Real sums[kEntries] = {};
#pragma unroll 1
    for (int block = 0; block < kBlock && column < item.stop; block += kRun<T>) {
      Run<T> x[kRows];
      load_runs(rows, stride, m, column + lane * kRun<T>, item.start, item.stop, width, x);
#pragma unroll
      for (int v = 0; v < kRun<T>; ++v) {
        Real now[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) now[i] = x[i].template get<Real>(v);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int j = 0; j <= i; ++j) sums[i * (i + 1) / 2 + j] += now[i] * now[j];
        }
      }
      column += kWarps * kWarp * kRun<T>;
    }
    scatter_sums(sums, total);
  }

  SHARED(double, totals, kWarps * kWarp * kSlots);
#pragma unroll
  for (int k = 0; k < kSlots; ++k) totals[(warp * kWarp + lane) * kSlots + k] = total[k];
  __syncthreads();
  for (int e = threadIdx.x; e < m * (m + 1) / 2; e += kDirectThreads) {
    double sum = 0.0;
    for (int w = 0; w < kWarps; ++w) sum += totals[w * kWarp * kSlots + e];
    partial[e * items + blockIdx.x] = sum;
  }
}

}  // namespace fl_lightning::cuda
