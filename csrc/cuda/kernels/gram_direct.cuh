// SPDX-License-Identifier: Apache-2.0
// Gram matrices of up to 16 rows: each thread loads a run of columns of all rows into registers and keeps all pairs.
//
// Every number is loaded once, with nothing between memory and registers.
#pragma once

#include "partials.cuh"

namespace fl_lightning::cuda {

// Of a warp's square in shared memory: rows and columns both spread over all banks.
constexpr int kSquarePitch = kWarp + 1;

// totals[i] grows by value i, added up over the warp, for all i of lane i % 32. The square carries 32 values of every
// lane to the lane that adds them up; by shuffles it would take more steps, and more registers than there are.
template <int kCount, class Real, class Square, class Totals>
__device__ inline void add_over_warp(const Real (&values)[kCount], Square square, Totals totals) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int first = 0; first < kCount; first += kWarp) {
#pragma unroll
    for (int k = 0; k < kWarp && first + k < kCount; ++k) square[k * kSquarePitch + lane] = values[first + k];
    __syncwarp();
    if (first + lane < kCount) {
      double sum = 0.0;
#pragma unroll
      for (int k = 0; k < kWarp; ++k) sum += static_cast<Real>(square[lane * kSquarePitch + k]);
      totals[first + lane] += sum;
    }
    __syncwarp();
  }
}

template <class T, int kRows>
__global__ void __launch_bounds__(kDirectThreads)
    gram_direct(const T* rows, std::int64_t stride, int m, const __grid_constant__ LayerTable table, std::int64_t items,
                double* partial) {
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
  constexpr int kWarps = kDirectThreads / kWarp, kEntries = kRows * (kRows + 1) / 2;
  const Item item = find_item(table, blockIdx.x);
  if (skips(item)) return;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const std::int64_t first = aligned_start(rows, item.start);
  const int width = vector_width(rows, stride, first);

  static_assert(kWarps * (kWarp * kSquarePitch * sizeof(Real) + kEntries * 8) <= kDeclaredShared);
  SHARED(Real, squares, kWarps * kWarp * kSquarePitch);
  SHARED(double, totals, kWarps* kEntries);
  for (int e = lane; e < kEntries; e += kWarp) totals[warp * kEntries + e] = 0.0;
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
    add_over_warp(sums, squares + warp * kWarp * kSquarePitch, totals + warp * kEntries);
  }

  __syncthreads();
  bool bad = false;
  const int entries = m * (m + 1) / 2;
  for (int e = threadIdx.x; e < entries; e += kDirectThreads) {
    double sum = 0.0;
    for (int w = 0; w < kWarps; ++w) sum += totals[w * kEntries + e];
    partial[e * items + blockIdx.x] = sum;
    bad |= !isfinite(sum);
  }
  const auto place = [&](int e) { return e * items + blockIdx.x; };
  sum_again(bad, item, entries, partial, place, [&](int e, std::int64_t column) {
    const auto [i, j] = tile_pair<true>(e, 0);
    return widen<double>(rows[i * stride + column]) * widen<double>(rows[j * stride + column]);
  });
}

}  // namespace fl_lightning::cuda
