// SPDX-License-Identifier: Apache-2.0
#include "device/columns.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "trimmed_mean";
constexpr int kFewThreads = 128, kThreads = 256;
constexpr int kBytes = 48 << 10;  // of shared memory that a block may declare
template <class T>
using Compared = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <class T>
constexpr int kNumbers = kBytes / sizeof(Compared<T>);  // in shared memory

// Batcher's network has stages, for p = 1, 2, 4, ... below the number of rows, and k = p, p/2, ..., 1. In each, the row
// at `low` meets the row k behind it, or nobody. p is 2^log_p, k is 2^log_k.
__device__ constexpr bool meets(int low, int log_p, int log_k) {
  const int from = low - (log_k == log_p ? 0 : 1 << log_k);
  return from >= 0 && (from >> log_k & 1) == 0 && low >> (log_p + 1) == (low + (1 << log_k)) >> (log_p + 1);
}

// Of float32 numbers by one instruction each, which may lose a NaN.
__device__ inline float lesser(float a, float b) { return fminf(a, b); }
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double lesser(double a, double b) { return a < b ? a : b; }
__device__ inline double larger(double a, double b) { return a < b ? b : a; }

// All of it on numbers in registers, from this stage on.
template <int kRows, int kLogP, int kLogK, class Real>
__device__ inline void sort(Real (&x)[kRows]) {
#pragma unroll
  for (int low = 0; low < kRows - (1 << kLogK); ++low) {
    if (!meets(low, kLogP, kLogK)) continue;
    const Real a = x[low], b = x[low + (1 << kLogK)];
    x[low] = lesser(a, b);
    x[low + (1 << kLogK)] = larger(a, b);
  }
  if constexpr (kLogK > 0) {
    sort<kRows, kLogP, kLogK - 1>(x);
  } else if constexpr (2 << kLogP < kRows) {
    sort<kRows, kLogP + 1, kLogP + 1>(x);
  }
}

// One thread per column of up to kRows rows; those that are missing are infinite, and end up last.
template <class T, int kRows>
__global__ void __launch_bounds__(kFewThreads)
    trim_few(const T* rows, std::int64_t stride, int m, std::int64_t columns, int cut, T* out) {
  using Real = Compared<T>;
  const std::int64_t column = std::int64_t{blockIdx.x} * kFewThreads + threadIdx.x;
  if (column >= columns) return;
  Real x[kRows];
  bool nan = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    x[r] = r < m ? widen<Real>(rows[r * stride + column]) : static_cast<Real>(INFINITY);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) nan |= x[r] != x[r];
  sort<kRows, 0, 0>(x);
  double sum = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= cut && r < m - cut) sum += x[r];
  }
  out[column] = narrow<T>(nan ? static_cast<double>(NAN) : sum / (m - 2 * cut));
}

// A block sorts 2^shift columns in shared memory; the exchanges of one stage do not touch each other. Then one thread
// per column adds up the middle in order.
template <class T>
__global__ void __launch_bounds__(kThreads)
    trim(const T* rows, std::int64_t stride, int m, std::int64_t columns, int cut, int shift, T* out) {
  using Real = Compared<T>;
  SHARED(Real, x, kNumbers<T>);
  const int lanes = 1 << shift;
  const std::int64_t first = std::int64_t{blockIdx.x} << shift;
  for (int i = threadIdx.x; i < m << shift; i += kThreads) {
    const std::int64_t column = first + (i & (lanes - 1));
    x[i] = column < columns ? widen<Real>(rows[(i >> shift) * stride + column]) : Real{0};
  }
  __syncthreads();
  for (int log_p = 0; 1 << log_p < m; ++log_p) {
    for (int log_k = log_p; log_k >= 0; --log_k) {
      const int apart = 1 << (log_k + shift);
      for (int i = threadIdx.x; i < (m << shift) - apart; i += kThreads) {
        if (!meets(i >> shift, log_p, log_k)) continue;
        const Real a = x[i], b = x[i + apart];
        x[i] = a < b ? a : b;  // of a NaN and another number none is lost
        x[i + apart] = a < b ? b : a;
      }
      __syncthreads();
    }
  }
  for (int lane = threadIdx.x; lane < lanes && first + lane < columns; lane += kThreads) {
    double sum = 0;
    for (int r = 0; r < m; ++r) {
      const Real value = x[(r << shift) + lane];
      if ((r >= cut && r < m - cut) || value != value) sum += value;  // one NaN makes the whole column NaN
    }
    out[first + lane] = narrow<T>(sum / (m - 2 * cut));
  }
}

template <class T, int kRows>
void launch_few(Matrix rows, int cut, T* out, const Context& context) {
  launch(kOp, trim_few<T, kRows>, (rows.columns + kFewThreads - 1) / kFewThreads, kFewThreads, context,
         static_cast<const T*>(rows.data), rows.stride, static_cast<int>(rows.rows), rows.columns, cut, out);
}

}  // namespace

void trimmed_mean(Matrix rows, std::int64_t cut_rows, void* out_data, Context context) {
  with_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (rows.rows > kNumbers<T>) {
      throw std::runtime_error(std::string("fl_lightning::") + kOp + " takes at most " + std::to_string(kNumbers<T>) +
                               " rows on CUDA");
    }
    T* const out = static_cast<T*>(out_data);
    const int m = static_cast<int>(rows.rows), cut = static_cast<int>(cut_rows);
    if (m <= 10) return launch_few<T, 10>(rows, cut, out, context);
    if (m <= 16) return launch_few<T, 16>(rows, cut, out, context);
    if (m <= 32) return launch_few<T, 32>(rows, cut, out, context);
    if (m <= 64) return launch_few<T, 64>(rows, cut, out, context);
    int shift = 5;
    while (m << shift > kNumbers<T>) --shift;
    launch(kOp, trim<T>, ((rows.columns - 1) >> shift) + 1, kThreads, context, static_cast<const T*>(rows.data),
           rows.stride, m, rows.columns, cut, shift, out);
  });
}

}  // namespace fl_lightning::cuda
