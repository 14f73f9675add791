// SPDX-License-Identifier: Apache-2.0
// Gram matrices of up to 16 rows: each thread loads a run of columns of all rows into registers and keeps all pairs.
//
// Every number is loaded once, with nothing between memory and registers.
#pragma once

#include "partials.cuh"

namespace fl_lightning::cuda {

// Columns [column, column + kRun) of all rows; rows from m on are 0.
template <int kRows, class T>
__device__ inline void load_runs(const T* rows, std::int64_t stride, int m, std::int64_t column, const Item& item,
                                 int width, T (&to)[kRows][kRun<T>]) {
  // One branch around all rows: their loads then stand together and wait together.
  const auto each = [&](auto load) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < m) {
        load(rows + r * stride + column, to[r]);
      } else {
#pragma unroll
        for (int v = 0; v < kRun<T>; ++v) to[r][v] = narrow<T>(0.0);
      }
    }
  };
  if (column < item.start || column + kRun<T> > item.stop) {
    each([&](const T* from, T(&run)[kRun<T>]) { load_run(from - column, column, item.start, item.stop, 0, run); });
  } else if (width == 16) {
    each([](const T* from, T(&run)[kRun<T>]) { load_pieces<16>(from, run); });
  } else if (width == 8) {
    each([](const T* from, T(&run)[kRun<T>]) { load_pieces<8>(from, run); });
  } else if (width == 4) {
    each([](const T* from, T(&run)[kRun<T>]) { load_pieces<4>(from, run); });
  } else {
    each([](const T* from, T(&run)[kRun<T>]) { load_pieces<sizeof(T)>(from, run); });
  }
}

// Adds values over the lanes of a warp: lane i ends with the sums of values [i * kSlots, (i + 1) * kSlots). Each step
// halves what a lane keeps, so that a sum costs two exchanges, not five.
template <int kCount, int kSlots, class Real>
__device__ inline void scatter_sums(const Real (&values)[kCount], double (&sums)[kSlots]) {
  static_assert(kSlots * kWarp >= kCount);
  constexpr int kHalf = kSlots * kWarp / 2;
  const unsigned lane = threadIdx.x % kWarp;
  double part[kHalf];
#pragma unroll
  for (int k = 0; k < kHalf; ++k) {
    const Real low = k < kCount ? values[k < kCount ? k : 0] : Real{0};
    const Real high = k + kHalf < kCount ? values[k + kHalf < kCount ? k + kHalf : 0] : Real{0};
    const bool upper = lane & (kWarp / 2);
    const Real received = __shfl_xor_sync(kFullWarp, upper ? low : high, kWarp / 2);
    part[k] = static_cast<double>(upper ? high : low) + static_cast<double>(received);
  }
#pragma unroll
  for (int mask = kWarp / 4; mask > 0; mask /= 2) {
    const bool upper = lane & mask;
#pragma unroll
    for (int k = 0; k < kSlots * mask; ++k) {
      const double low = part[k], high = part[k + kSlots * mask];
      part[k] = (upper ? high : low) + __shfl_xor_sync(kFullWarp, upper ? low : high, mask);
    }
  }
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
      T x[kRows][kRun<T>];
      load_runs(rows, stride, m, column + lane * kRun<T>, item, width, x);
#pragma unroll
      for (int v = 0; v < kRun<T>; ++v) {
        Real now[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) now[i] = widen<Real>(x[i][v]);
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
