// SPDX-License-Identifier: Apache-2.0
// Products of up to 16 rows with themselves or with up to 16 others: each thread loads a run of columns of all rows
// into registers and keeps all pairs, or of others those of 8 rows with 8.
//
// Nothing lies between memory and registers. Every number is loaded once, or of others once per warp of a block that
// needs it: the second warp finds it in the cache.
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

// Of float32 rows. The rows and the others are each halved where they are more than kSide, and a warp has a tile: the
// products of one part with one part, in a share of the columns.
template <int kSide>
__global__ void __launch_bounds__(kDirectThreads, kCrossBlocks)
    cross_direct(const Matrix a, const Matrix b, const __grid_constant__ LayerTable table, std::int64_t items,
                 double* partial) {
  constexpr int kWarps = kDirectThreads / kWarp, kEntries = kSide * kSide, kSpan = kWarp * kRun<float>;
  const Item item = find_item(table, blockIdx.x);
  if (skips(item)) return;
  const int m = static_cast<int>(a.rows), h = static_cast<int>(b.rows);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int down = m > kSide ? 2 : 1, across = h > kSide ? 2 : 1, tiles = down * across, tile = warp % tiles;
  const int tall = (m + down - 1) / down, wide = (h + across - 1) / across;
  const int row = tile / across * tall, other = tile % across * wide;
  const float* rows = static_cast<const float*>(a.data) + row * a.stride;
  const float* others = static_cast<const float*>(b.data) + other * b.stride;
  const std::int64_t first = aligned_start(static_cast<const float*>(a.data), item.start);
  const int width = vector_width(rows, a.stride, first), other_width = vector_width(others, b.stride, first);

  SHARED(float, squares, kWarps * kWarp * kSquarePitch);
  SHARED(double, totals, kWarps* kEntries);
  for (int e = lane; e < kEntries; e += kWarp) totals[warp * kEntries + e] = 0.0;
  std::int64_t column = first + warp / tiles * kSpan;
  while (column < item.stop) {
    float sums[kEntries] = {};
#pragma unroll 1
    for (int block = 0; block < kBlock && column < item.stop; block += kRun<float>) {
      Run<float> x[kSide], y[kSide];
      const std::int64_t at = column + lane * kRun<float>;
      load_runs(rows, a.stride, m - row < tall ? m - row : tall, at, item.start, item.stop, width, x);
      load_runs(others, b.stride, h - other < wide ? h - other : wide, at, item.start, item.stop, other_width, y);
#pragma unroll
      for (int e = 0; e < kEntries; ++e) {
#pragma unroll
        for (int v = 0; v < kRun<float>; ++v) {
          sums[e] += x[e / kSide].stored[v] * y[e % kSide].stored[v];
        }
      }
      column += kWarps / tiles * kSpan;
    }
    add_over_warp(sums, squares + warp * kWarp * kSquarePitch, totals + warp * kEntries);
  }

  __syncthreads();
  bool bad = false;
  const auto place = [&](int e) { return std::int64_t{e} * items + blockIdx.x; };
  for (int e = threadIdx.x; e < m * h; e += kDirectThreads) {
    const int i = e / h, j = e % h;
    const int own = i / tall * across + j / wide, pair = i % tall * kSide + j % wide;
    double sum = 0.0;
    for (int w = own; w < kWarps; w += tiles) sum += totals[w * kEntries + pair];
    partial[place(e)] = sum;
    bad |= !isfinite(sum);
  }
  sum_again(bad, item, m * h, partial, place,
            [&](int e, std::int64_t c) { return element(a, e / h, c) * element(b, e % h, c); });
}

}  // namespace fl_lightning::cuda
