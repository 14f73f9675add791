// SPDX-License-Identifier: Apache-2.0
// Products of every row with a step, or with itself: a block has an item and up to kRowsTogether rows. Where there are
// more, all blocks have about as many; a row's bits do not depend on how many.
#pragma once

#include "partials.cuh"

namespace fl_lightning::cuda {

// kRows sums over the warp, each with the bits of warp_sum, in far fewer exchanges: lane l gets that of row
// warp_row<kRows>(l). Each lane sends the half of its rows that the other lane goes on with.
template <int kRows>
__device__ inline double warp_sums(const double (&x)[kRows], int mask = 1) {
  if constexpr (kRows == 1) {
    double sum = x[0];
    for (; mask < kWarp; mask *= 2) sum += __shfl_xor_sync(kFullWarp, sum, mask);
    return sum;
  } else {
    const bool upper = (threadIdx.x & mask) != 0;
    double half[kRows / 2];
#pragma unroll
    for (int r = 0; r < kRows / 2; ++r) {
      const double sent = upper ? x[r] : x[r + kRows / 2], own = upper ? x[r + kRows / 2] : x[r];
      half[r] = own + __shfl_xor_sync(kFullWarp, sent, mask);
    }
    return warp_sums(half, 2 * mask);
  }
}
template <int kRows>
__device__ inline int warp_row(int lane) {
  int row = 0;
  for (int half = kRows / 2; half > 0; half /= 2, lane /= 2) row += lane % 2 * half;
  return row;
}

// The end of a block that has summed products of kRows rows: the threads' sums become partials of the item, of rows
// from first_row on. count of the rows exist; product(e, column) is what row e sums.
template <int kRows, class Product>
__device__ inline void leave_row_sums(const double (&totals)[kRows], int count, const Item& item, double* partial,
                                      std::int64_t first_row, std::int64_t items, std::int64_t index, Product product) {
  SHARED(double, warps, kRowThreads / kWarp * kRows);
  const int lane = threadIdx.x % kWarp;
  const double own = warp_sums(totals);
  if (lane < kRows) warps[threadIdx.x / kWarp * kRows + warp_row<kRows>(lane)] = own;
  __syncthreads();
  double sum = 0.0;
  const auto place = [&](int e) { return (first_row + e) * items + index; };
  if (static_cast<int>(threadIdx.x) < count) {
    for (int w = 0; w < kRowThreads / kWarp; ++w) sum += warps[w * kRows + threadIdx.x];
    partial[place(static_cast<int>(threadIdx.x))] = sum;
  }
  sum_again(!isfinite(sum), item, count, partial, place, product);
}

// kOwn: of each row with itself. There a thread takes runs of columns by their number, not by their address as the
// other products do: rows that begin anywhere are added up in one order, and only the width of their loads differs. The
// blocks of one item run side by side: the step comes from the cache.
template <class T, bool kOwn, int kRows>
__global__ void __launch_bounds__(kRowThreads, row_blocks(sizeof(T), kRows))
    multiply_rows(const T* rows, std::int64_t stride, std::int64_t m, unsigned groups, const T* step,
                  const __grid_constant__ LayerTable table, std::int64_t items, double* partial) {
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
  constexpr int kSteps = row_steps(sizeof(T), kRows);
  const unsigned index = blockIdx.x / groups;
  const std::int64_t each = (m + groups - 1) / groups, first_row = blockIdx.x % groups * each, left = m - first_row;
  const Item item = find_item(table, index);
  if (skips(item)) return;
  const T* own = rows + first_row * stride;
  const std::int64_t count = left < each ? left : each;
  const std::int64_t first = kOwn ? item.start / kRun<T> * kRun<T> : aligned_start(rows, item.start);
  const int width = vector_width(own, stride, first), step_width = kOwn ? 0 : vector_width(step, 0, first);
  constexpr int kApart = kRowThreads * kRun<T>;

  double total[kRows] = {};
  std::int64_t column = first + threadIdx.x * kRun<T>;
  while (column < item.stop) {
    Real sums[kRows] = {};
#pragma unroll 1
    for (int block = 0; block < kBlock && column < item.stop; block += kRun<T> * kSteps) {
      Run<T> s[kSteps][1], x[kSteps][kRows];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const std::int64_t at = column + k * kApart;
        if constexpr (!kOwn) load_runs(step, 0, 1, at, item.start, item.stop, step_width, s[k]);
        load_runs(own, stride, count, at, item.start, item.stop, width, x[k]);
      }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int v = 0; v < kRun<T>; ++v) {
            sums[r] += x[k][r].template get<Real>(v) * (kOwn ? x[k][r] : s[k][0]).template get<Real>(v);
          }
        }
      }
      column += kApart * kSteps;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) total[r] += sums[r];
  }
  leave_row_sums(total, static_cast<int>(count), item, partial, first_row, items, index, [&](int e, std::int64_t c) {
    const double x = widen<double>(own[e * stride + c]);
    return x * (kOwn ? x : widen<double>(step[c]));
  });
}

template <bool kOwn>
void row_products(const char* op, Matrix rows, Matrix step, Layers layers, double* out, const Context& context) {
  const LayerTable table = make_table(op, layers, chunk_shift(layers), context);
  const std::int64_t items = item_count(table, rows.columns), m = rows.rows;
  double* partial = scratch<double>(context, m * items);
  with_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool few = m <= kFewRows;
    const std::int64_t groups = few ? 1 : (m + kRowsTogether - 1) / kRowsTogether;
    launch(op, few ? multiply_rows<T, kOwn, kFewRows> : multiply_rows<T, kOwn, kRowsTogether>, items * groups,
           kRowThreads, context, static_cast<const T*>(rows.data), rows.stride, m, static_cast<unsigned>(groups),
           static_cast<const T*>(step.data), table, items, partial);
  });
  add_partials<kOwn ? Pairs::own : Pairs::all>(op, partial, items, table, rows, step, out, context);
}

}  // namespace fl_lightning::cuda
