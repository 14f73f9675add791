// SPDX-License-Identifier: Apache-2.0
#include "device/columns.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "puc_combine";

// One thread per run of columns, which lies in one keep word whatever the address of the rows.
template <class T>
__global__ void __launch_bounds__(kMeanThreads, mean_blocks(sizeof(T)))
    combine(const T* rows, std::int64_t stride, std::int64_t m, std::int64_t columns, const std::int32_t* keep,
            const double* weights, T* out) {
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const std::int64_t column = (std::int64_t{blockIdx.x} * kMeanThreads + threadIdx.x) * kRun<T>,
                     words = (columns + 31) / 32;
  if (column >= columns) return;
  const int width = vector_width(rows, stride, 0), out_width = vector_width<T>(out, 0, 0);
  const std::int32_t* own_keep = keep + column / 32;
  const int shift = static_cast<int>(column % 32);
  double sum[kRun<T>] = {}, weight[kRun<T>] = {};
  unsigned any = 0;
  for (std::int64_t i = 0; i < m; i += kMeanRows) {
    Run<T> x[kMeanRows];
    unsigned bits[kMeanRows];
    double own[kMeanRows];
#pragma unroll
    for (int r = 0; r < kMeanRows; ++r) {
      bits[r] = r < m - i ? static_cast<unsigned>(own_keep[(i + r) * words]) : 0u;
      own[r] = r < m - i ? weights[i + r] : 0.0;
    }
    load_runs(rows + i * stride, stride, m - i, column, 0, columns, width, x);
#pragma unroll
    for (int r = 0; r < kMeanRows; ++r) {
      bits[r] >>= shift;
      any |= bits[r];
#pragma unroll
      for (int v = 0; v < kRun<T>; ++v) {
        const bool kept = bits[r] >> v & 1u;
        const double chosen = kept ? own[r] : 0.0;  // without a branch; what is not kept may be NaN
        sum[v] += chosen * static_cast<double>(kept ? x[r].template get<Real>(v) : Real{0});
        weight[v] += chosen;
      }
    }
  }
  T result[kRun<T>];
#pragma unroll
  for (int v = 0; v < kRun<T>; ++v) result[v] = narrow<T>(any >> v & 1u ? sum[v] / weight[v] : 0.0);
  store_run(result, column, 0, columns, out_width, out);
}

}  // namespace

void puc_combine(Matrix rows, const std::int32_t* keep, const double* weights, void* out, Context context) {
  with_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t runs = (rows.columns + kRun<T> - 1) / kRun<T>;
    launch(kOp, combine<T>, (runs + kMeanThreads - 1) / kMeanThreads, kMeanThreads, context,
           static_cast<const T*>(rows.data), rows.stride, rows.rows, rows.columns, keep, weights, static_cast<T*>(out));
  });
}

}  // namespace fl_lightning::cuda
