// SPDX-License-Identifier: Apache-2.0
#include "kernels/partials.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "layer_dots";
constexpr int kRows = 8;

// One block per item and kRows rows. The blocks of one item run side by side: the step comes from the cache.
template <class T>
__global__ void __launch_bounds__(kRowThreads, 2)
    dots(const T* rows, std::int64_t stride, std::int64_t m, const T* step, const __grid_constant__ LayerTable table,
         std::int64_t items, double* partial) {
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const std::int64_t groups = (m + kRows - 1) / kRows, index = blockIdx.x / groups;
  const std::int64_t first_row = blockIdx.x % groups * kRows;
  const Item item = find_item(table, index);
  if (skips(item)) return;
  const T* own = rows + first_row * stride;
  const std::int64_t count = m - first_row < kRows ? m - first_row : kRows, first = aligned_start(own, item.start);
  const int width = vector_width(own, stride, first), step_width = vector_width(step, 0, first);

  double total[kRows] = {};
  std::int64_t column = first + threadIdx.x * kRun<T>;
  while (column < item.stop) {
    Real sums[kRows] = {};
#pragma unroll 1
    for (int block = 0; block < kBlock && column < item.stop; block += kRun<T>) {
      Run<T> s[1];
      load_runs(step, 0, 1, column, item.start, item.stop, step_width, s);
      Run<T> x[kRows];
      load_runs(own, stride, count, column, item.start, item.stop, width, x);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int v = 0; v < kRun<T>; ++v) sums[r] += x[r].template get<Real>(v) * s[0].template get<Real>(v);
      }
      column += kRowThreads * kRun<T>;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) total[r] += sums[r];
  }
  leave_row_sums(total, static_cast<int>(count), item, partial, first_row, items, index,
                 [&](int e, std::int64_t c) { return widen<double>(own[e * stride + c]) * widen<double>(step[c]); });
}

}  // namespace

void layer_dots(Matrix rows, const void* step, Layers layers, double* out, Context context) {
  const LayerTable table = make_table(kOp, layers, chunk_shift(layers), context);
  const std::int64_t items = item_count(table, rows.columns), m = rows.rows;
  const Matrix other{step, 1, rows.columns, rows.columns, rows.dtype};
  double* partial = scratch<double>(context, m * items);
  with_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch(kOp, dots<T>, items * ((m + kRows - 1) / kRows), kRowThreads, context, static_cast<const T*>(rows.data),
           rows.stride, m, static_cast<const T*>(step), table, items, partial);
  });
  add_partials<Pairs::all>(kOp, partial, items, table, rows, other, out, context);
}

}  // namespace fl_lightning::cuda
