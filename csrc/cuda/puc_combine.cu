// SPDX-License-Identifier: Apache-2.0
#include "device/columns.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "puc_combine";
constexpr int kThreads = 128, kTogether = 8;  // rows loaded together

// Keep bits of the columns from column on, in the lowest count bits; column may be negative.
__device__ inline unsigned keep_bits(const std::int32_t* words, std::int64_t count, std::int64_t column, int run) {
  const std::int64_t word = column >= 0 ? column / 32 : -1;
  const unsigned shift = static_cast<unsigned>(column) % 32u;
  const unsigned low = word >= 0 ? static_cast<unsigned>(words[word]) : 0u;
  const bool beyond = shift + run > 32 && word + 1 < count;
  const unsigned high = beyond ? static_cast<unsigned>(words[word + 1]) : 0u;
  return __funnelshift_r(low, high, shift);
}

// One thread per run of columns.
template <class T>
__global__ void __launch_bounds__(kThreads)
    combine(const T* rows, std::int64_t stride, std::int64_t m, std::int64_t columns, const std::int32_t* keep,
            const double* weights, T* out) {
  const std::int64_t first = aligned_start(rows, 0), words = (columns + 31) / 32;
  const std::int64_t column = first + (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kRun<T>;
  if (column >= columns) return;
  const int width = vector_width(rows, stride, first), out_width = vector_width<T>(out, 0, first);
  double sum[kRun<T>] = {}, weight[kRun<T>] = {};
  unsigned any = 0;
  for (std::int64_t i = 0; i < m; i += kTogether) {
    Run<T> x[kTogether];
    load_runs(rows + i * stride, stride, m - i, column, 0, columns, width, x);
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      if (r >= m - i) break;
      const unsigned bits = keep_bits(keep + (i + r) * words, words, column, kRun<T>);
      const double own = weights[i + r];
      any |= bits;
#pragma unroll
      for (int v = 0; v < kRun<T>; ++v) {
        if (bits >> v & 1u) {  // what is not kept may be NaN
          sum[v] += own * x[r].template get<double>(v);
          weight[v] += own;
        }
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
    const std::int64_t runs = (rows.columns + 2 * kRun<T> - 2) / kRun<T>;  // the first may start before column 0
    launch(kOp, combine<T>, rows.columns > 0 ? (runs + kThreads - 1) / kThreads : 0, kThreads, context,
           static_cast<const T*>(rows.data), rows.stride, rows.rows, rows.columns, keep, weights, static_cast<T*>(out));
  });
}

}  // namespace fl_lightning::cuda
