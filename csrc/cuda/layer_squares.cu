// SPDX-License-Identifier: Apache-2.0
#include "kernels/partials.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "layer_squares";
constexpr int kRows = 8;

// One block per item and kRows rows. A thread takes runs of columns by their number, not by their address as the other
// products do: rows that begin anywhere are added up in one order, and only the width of their loads differs.
template <class T>
__global__ void __launch_bounds__(kRowThreads, 2)
    squares(const T* rows, std::int64_t stride, std::int64_t m, const __grid_constant__ LayerTable table,
            std::int64_t items, double* partial) {
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const std::int64_t groups = (m + kRows - 1) / kRows, index = blockIdx.x / groups;
  const std::int64_t first_row = blockIdx.x % groups * kRows;
  const Item item = find_item(table, index);
  if (skips(item)) return;
  const T* own = rows + first_row * stride;
  const std::int64_t count = m - first_row < kRows ? m - first_row : kRows, first = item.start / kRun<T> * kRun<T>;
  const int width = vector_width(own, stride, first);

  double total[kRows] = {};
  std::int64_t column = first + threadIdx.x * kRun<T>;
  while (column < item.stop) {
    Real sums[kRows] = {};
#pragma unroll 1
    for (int block = 0; block < kBlock && column < item.stop; block += kRun<T>) {
      Run<T> x[kRows];
      load_runs(own, stride, count, column, item.start, item.stop, width, x);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int v = 0; v < kRun<T>; ++v) sums[r] += x[r].template get<Real>(v) * x[r].template get<Real>(v);
      }
      column += kRowThreads * kRun<T>;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) total[r] += sums[r];
  }
  leave_row_sums(total, static_cast<int>(count), item, partial, first_row, items, index, [&](int e, std::int64_t c) {
    const double value = widen<double>(own[e * stride + c]);
    return value * value;
  });
}

}  // namespace

void layer_squares(Matrix rows, Layers layers, double* out, Context context) {
  const LayerTable table = make_table(kOp, layers, chunk_shift(layers), context);
  const std::int64_t items = item_count(table, rows.columns), m = rows.rows;
  double* partial = scratch<double>(context, m * items);
  with_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch(kOp, squares<T>, items * ((m + kRows - 1) / kRows), kRowThreads, context, static_cast<const T*>(rows.data),
           rows.stride, m, table, items, partial);
  });
  add_partials<Pairs::own>(kOp, partial, items, table, rows, rows, out, context);
}

}  // namespace fl_lightning::cuda
