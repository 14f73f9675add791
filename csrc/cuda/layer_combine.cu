// SPDX-License-Identifier: Apache-2.0
#include "columns.cuh"
#include "layers.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "layer_combine";
constexpr int kThreads = 256, kTogether = 8;  // rows loaded together

template <class T, bool kAdd>
__global__ void __launch_bounds__(kThreads)
    combine(const T* rows, std::int64_t stride, std::int64_t m, const __grid_constant__ LayerTable table,
            const double* coeff, T* out) {
  const Item item = find_item(table, blockIdx.x);
  if (item.start >= item.stop) return;
  const double* own = coeff + item.layer * m;
  const std::int64_t first = aligned_start(rows, item.start);
  const int width = piece_width(rows, stride, first), out_width = piece_width<T>(out, 0, first);
  for (std::int64_t column = first + threadIdx.x * kRun<T>; column < item.stop; column += kThreads * kRun<T>) {
    double sum[kRun<T>] = {};
    for (std::int64_t i = 0; i < m; i += kTogether) {
      Run<T> x[kTogether];
      load_runs(rows + i * stride, stride, m - i, column, item.start, item.stop, width, x);
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        if (r >= m - i) break;
        const double weight = own[i + r];
#pragma unroll
        for (int v = 0; v < kRun<T>; ++v) sum[v] += weight * x[r].template get<double>(v);
      }
    }
    T result[kRun<T>];
    if (kAdd) load_run(static_cast<const T*>(out), column, item.start, item.stop, out_width, result);
#pragma unroll
    for (int v = 0; v < kRun<T>; ++v) result[v] = narrow<T>(kAdd ? sum[v] + widen<double>(result[v]) : sum[v]);
    store_run(result, column, item.start, item.stop, out_width, out);
  }
}

}  // namespace

void layer_combine(Matrix rows, Layers layers, const double* coeff, void* out, bool add, Context context) {
  const LayerTable table = make_table(kOp, layers, chunk_shift(rows.columns), context);
  with_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch(kOp, add ? combine<T, true> : combine<T, false>, item_count(table, rows.columns), kThreads, context,
           static_cast<const T*>(rows.data), rows.stride, rows.rows, table, coeff, static_cast<T*>(out));
  });
}

}  // namespace fl_lightning::cuda
