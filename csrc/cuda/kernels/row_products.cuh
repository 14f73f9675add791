// SPDX-License-Identifier: Apache-2.0
// Products of every row with a step, or with itself: a block has an item and kRowsTogether rows.
#pragma once

#include "partials.cuh"

namespace fl_lightning::cuda {

constexpr int kRowThreads = 256, kRowsTogether = 8;

// The end of a block that has summed products of kRows rows: the threads' sums become partials of the item, of rows
// from first_row on. count of the rows exist; product(e, column) is what row e sums.
template <int kRows, class Product>
__device__ inline void leave_row_sums(const double (&totals)[kRows], int count, const Item& item, double* partial,
                                      std::int64_t first_row, std::int64_t items, std::int64_t index, Product product) {
  SHARED(double, warps, kRowThreads / kWarp * kRows);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const double sum = warp_sum(totals[r]);
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp * kRows + r] = sum;
  }
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
template <class T, bool kOwn>
__global__ void __launch_bounds__(kRowThreads, 2)
    multiply_rows(const T* rows, std::int64_t stride, std::int64_t m, const T* step,
                  const __grid_constant__ LayerTable table, std::int64_t items, double* partial) {
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const std::int64_t groups = (m + kRowsTogether - 1) / kRowsTogether, index = blockIdx.x / groups;
  const std::int64_t first_row = blockIdx.x % groups * kRowsTogether, left = m - first_row;
  const Item item = find_item(table, index);
  if (skips(item)) return;
  const T* own = rows + first_row * stride;
  const std::int64_t count = left < kRowsTogether ? left : kRowsTogether;
  const std::int64_t first = kOwn ? item.start / kRun<T> * kRun<T> : aligned_start(own, item.start);
  const int width = vector_width(own, stride, first), step_width = kOwn ? 0 : vector_width(step, 0, first);

  double total[kRowsTogether] = {};
  std::int64_t column = first + threadIdx.x * kRun<T>;
  while (column < item.stop) {
    Real sums[kRowsTogether] = {};
#pragma unroll 1
    for (int block = 0; block < kBlock && column < item.stop; block += kRun<T>) {
      Run<T> s[1], x[kRowsTogether];
      if constexpr (!kOwn) load_runs(step, 0, 1, column, item.start, item.stop, step_width, s);
      load_runs(own, stride, count, column, item.start, item.stop, width, x);
#pragma unroll
      for (int r = 0; r < kRowsTogether; ++r) {
#pragma unroll
        for (int v = 0; v < kRun<T>; ++v) {
          sums[r] += x[r].template get<Real>(v) * (kOwn ? x[r] : s[0]).template get<Real>(v);
        }
      }
      column += kRowThreads * kRun<T>;
    }
#pragma unroll
    for (int r = 0; r < kRowsTogether; ++r) total[r] += sums[r];
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
    launch(op, multiply_rows<T, kOwn>, items * ((m + kRowsTogether - 1) / kRowsTogether), kRowThreads, context,
           static_cast<const T*>(rows.data), rows.stride, m, static_cast<const T*>(step.data), table, items, partial);
  });
  add_partials<kOwn ? Pairs::own : Pairs::all>(op, partial, items, table, rows, step, out, context);
}

}  // namespace fl_lightning::cuda
