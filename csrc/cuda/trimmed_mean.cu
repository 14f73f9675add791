// SPDX-License-Identifier: Apache-2.0
#include "device/columns.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "trimmed_mean";
constexpr int kThreads = 256, kBytes = 48 << 10;  // of shared memory that a block may declare
template <class T>
using Compared = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <class T>
constexpr std::int64_t kNumbers = kBytes / sizeof(Compared<T>);  // in shared memory

// A block sorts `lanes` columns in shared memory with Batcher's network, whose stages are rounds of exchanges that do
// not touch each other. Then one thread per column adds up the middle in order.
template <class T>
__global__ void __launch_bounds__(kThreads) trim(const T* rows, std::int64_t stride, std::int64_t m,
                                                 std::int64_t columns, std::int64_t cut, std::int64_t lanes, T* out) {
  using Real = Compared<T>;
  SHARED(Real, x, kNumbers<T>);
  const std::int64_t first = std::int64_t{blockIdx.x} * lanes;
  for (std::int64_t i = threadIdx.x; i < m * lanes; i += kThreads) {
    const std::int64_t column = first + i % lanes;
    x[i] = column < columns ? widen<Real>(rows[i / lanes * stride + column]) : Real{0};
  }
  __syncthreads();
  for (std::int64_t p = 1; p < m; p *= 2) {
    for (std::int64_t k = p; k >= 1; k /= 2) {
      for (std::int64_t i = threadIdx.x; i < (m - k) * lanes; i += kThreads) {
        const std::int64_t low = i / lanes, from = low - k % p;
        if (from < 0 || from / k % 2 != 0 || low / (2 * p) != (low + k) / (2 * p)) continue;
        const Real a = x[i], b = x[i + k * lanes];
        x[i] = a < b ? a : b;  // of a NaN and another number none is lost
        x[i + k * lanes] = a < b ? b : a;
      }
      __syncthreads();
    }
  }
  for (std::int64_t lane = threadIdx.x; lane < lanes && first + lane < columns; lane += kThreads) {
    double sum = 0;
    for (std::int64_t r = 0; r < m; ++r) {
      const Real value = x[r * lanes + lane];
      if ((r >= cut && r < m - cut) || value != value) sum += value;  // one NaN makes the whole column NaN
    }
    out[first + lane] = narrow<T>(sum / static_cast<double>(m - 2 * cut));
  }
}

}  // namespace

void trimmed_mean(Matrix rows, std::int64_t cut, void* out, Context context) {
  with_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t fitting = kNumbers<T> / rows.rows, lanes = fitting < kWarp ? fitting : kWarp;
    if (lanes == 0) {
      throw std::runtime_error(std::string("fl_lightning::") + kOp + " takes at most " + std::to_string(kNumbers<T>) +
                               " rows on CUDA");
    }
    launch(kOp, trim<T>, (rows.columns + lanes - 1) / lanes, kThreads, context, static_cast<const T*>(rows.data),
           rows.stride, rows.rows, rows.columns, cut, lanes, static_cast<T*>(out));
  });
}

}  // namespace fl_lightning::cuda
