// SPDX-License-Identifier: Apache-2.0
#include "device/columns.cuh"
#include "device/layers.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "layer_combine";

// Adds the rows' part of one run of columns. With kSkip rows whose coefficient is 0 do not count, whatever they hold,
// and are not read where all of a group are such.
template <bool kSkip, class T>
__device__ inline void add_rows(const T* rows, std::int64_t stride, std::int64_t m, const double* own,
                                std::int64_t column, const Item& item, int width, double (&sum)[kRun<T>]) {
  for (std::int64_t i = 0; i < m; i += kCombineRows) {
    if (kSkip) {
      bool any = false;
      for (int r = 0; r < kCombineRows && r < m - i; ++r) any |= own[i + r] != 0.0;
      if (!any) continue;
    }
    Run<T> x[kCombineRows];
    load_runs(rows + i * stride, stride, m - i, column, item.start, item.stop, width, x);
#pragma unroll
    for (int r = 0; r < kCombineRows; ++r) {
      if (r >= m - i) break;
      const double weight = own[i + r];
      if (kSkip && weight == 0.0) continue;
#pragma unroll
      for (int v = 0; v < kRun<T>; ++v) sum[v] += weight * x[r].template get<double>(v);
    }
  }
}

// Items from the last to the first: the last rows that layer_gram has read before are in the second-level cache.
template <class T, class Out, bool kAdd, bool kCross>
__global__ void __launch_bounds__(kCombineThreads)
    combine(const T* rows, std::int64_t stride, std::int64_t m, const T* others, std::int64_t other_stride,
            std::int64_t h, const __grid_constant__ LayerTable table, const double* coeff, Out* out) {
  const Item item = find_item(table, gridDim.x - 1 - blockIdx.x);
  if (item.start >= item.stop) return;
  const double* own = coeff + item.layer * (kCross ? m + h : m);
  const std::int64_t first = aligned_start(rows, item.start);
  const int width = vector_width(rows, stride, first), out_width = vector_width<Out>(out, 0, first);
  const int other_width = kCross ? vector_width(others, other_stride, first) : 0;
  for (std::int64_t column = first + threadIdx.x * kRun<T>; column < item.stop; column += kCombineThreads * kRun<T>) {
    double sum[kRun<T>] = {};
    add_rows<kCross>(rows, stride, m, own, column, item, width, sum);
    if (kCross) add_rows<kCross>(others, other_stride, h, own + m, column, item, other_width, sum);
    Out result[kRun<T>];
    if (kAdd) load_run(static_cast<const Out*>(out), column, item.start, item.stop, out_width, result);
#pragma unroll
    for (int v = 0; v < kRun<T>; ++v) result[v] = narrow<Out>(kAdd ? sum[v] + widen<double>(result[v]) : sum[v]);
    store_run(result, column, item.start, item.stop, out_width, out);
  }
}

template <class T, class Out>
void launch_single(void (*kernel)(const T*, std::int64_t, std::int64_t, const T*, std::int64_t, std::int64_t,
                                  LayerTable, const double*, Out*),
                   Matrix rows, const LayerTable& table, const double* coeff, Out* out, const Context& context) {
  launch(kOp, kernel, item_count(table, rows.columns), kCombineThreads, context, static_cast<const T*>(rows.data),
         rows.stride, rows.rows, static_cast<const T*>(nullptr), std::int64_t{0}, std::int64_t{0}, table, coeff, out);
}

}  // namespace

void layer_combine(Matrix rows, Layers layers, const double* coeff, void* out, bool add, Context context) {
  const LayerTable table = make_table(kOp, layers, chunk_shift(layers), context);
  with_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch_single(add ? combine<T, T, true, false> : combine<T, T, false, false>, rows, table, coeff,
                  static_cast<T*>(out), context);
  });
}

void layer_combine_mixed(Matrix rows, Layers layers, const double* coeff, void* out, DType type, Context context) {
  const LayerTable table = make_table(kOp, layers, chunk_shift(layers), context);
  with_type(rows.dtype, [&](auto zero) {
    with_type(type, [&](auto out_zero) {
      using T = decltype(zero);
      using Out = decltype(out_zero);
      launch_single(combine<T, Out, true, false>, rows, table, coeff, static_cast<Out*>(out), context);
    });
  });
}

void layer_cross_combine(Matrix rows, Matrix others, Layers layers, const double* coeff, void* out, Context context) {
  const LayerTable table = make_table("layer_cross_combine", layers, chunk_shift(layers), context);
  with_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch("layer_cross_combine", combine<T, T, false, true>, item_count(table, rows.columns), kCombineThreads, context,
           static_cast<const T*>(rows.data), rows.stride, rows.rows, static_cast<const T*>(others.data), others.stride,
           others.rows, table, coeff, static_cast<T*>(out));
  });
}

}  // namespace fl_lightning::cuda
