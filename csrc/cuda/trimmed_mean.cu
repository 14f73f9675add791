// SPDX-License-Identifier: Apache-2.0
#include "device/columns.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "trimmed_mean";
template <class T>
using Compared = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <class T>
constexpr int kNumbers = kDeclaredShared / sizeof(Compared<T>);  // in shared memory

// Batcher's network has stages, for p = 1, 2, 4, ... below the number of rows, and k = p, p/2, ..., 1. In each, the row
// at `low` meets the row k behind it, or nobody. p is 2^log_p, k is 2^log_k.
__device__ constexpr bool meets(int low, int log_p, int log_k) {
  const int from = low - (log_k == log_p ? 0 : 1 << log_k);
  return from >= 0 && (from >> log_k & 1) == 0 && low >> (log_p + 1) == (low + (1 << log_k)) >> (log_p + 1);
}

// Of numbers by one instruction each, which may lose a NaN. Two numbers of 16 bits lie in one word.
template <class T>
struct Order {
  static __device__ T lesser(T a, T b) { return a < b ? a : b; }
  static __device__ T larger(T a, T b) { return a < b ? b : a; }
};
template <>
struct Order<float> {
  static __device__ float lesser(float a, float b) { return fminf(a, b); }
  static __device__ float larger(float a, float b) { return fmaxf(a, b); }
};
template <class Pair>
struct PairOrder {
  static __device__ Pair pair(unsigned word) {
    Pair result;
    memcpy(&result, &word, sizeof word);
    return result;
  }
  static __device__ unsigned word(Pair pair) {
    unsigned result;
    memcpy(&result, &pair, sizeof result);
    return result;
  }
  static __device__ unsigned lesser(unsigned a, unsigned b) { return word(__hmin2(pair(a), pair(b))); }
  static __device__ unsigned larger(unsigned a, unsigned b) { return word(__hmax2(pair(a), pair(b))); }
  static __device__ unsigned larger_or_nan(unsigned a, unsigned b) { return word(__hmax2_nan(pair(a), pair(b))); }
};
template <>
struct Order<__half> : PairOrder<__half2> {
  static constexpr unsigned kInfinite = 0x7c007c00u;
};
template <>
struct Order<__nv_bfloat16> : PairOrder<__nv_bfloat162> {
  static constexpr unsigned kInfinite = 0x7f807f80u;
};

template <class T>
__device__ inline auto infinite() {
  if constexpr (sizeof(T) == 2) {
    return Order<T>::kInfinite;
  } else {
    return static_cast<T>(INFINITY);
  }
}

// All of it on words in registers, from this stage on.
template <class T, int kRows, int kLogP, int kLogK, class Runs>
__device__ inline void sort(Runs (&x)[kRows]) {
#pragma unroll
  for (int low = 0; low < kRows - (1 << kLogK); ++low) {
    if (!meets(low, kLogP, kLogK)) continue;
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof x[0].stored / sizeof x[0].stored[0]); ++w) {
      const auto a = x[low].stored[w], b = x[low + (1 << kLogK)].stored[w];
      x[low].stored[w] = Order<T>::lesser(a, b);
      x[low + (1 << kLogK)].stored[w] = Order<T>::larger(a, b);
    }
  }
  if constexpr (kLogK > 0) {
    sort<T, kRows, kLogP, kLogK - 1>(x);
  } else if constexpr (2 << kLogP < kRows) {
    sort<T, kRows, kLogP + 1, kLogP + 1>(x);
  }
}

// Before compute capability 8.0 there is no such instruction for a pair: what stands for it takes ten times the code.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kComparesPairs = false;
#else
constexpr bool kComparesPairs = true;
#endif

// Of one column; NaN if one of its numbers is.
template <class T, int kRows>
__device__ inline double column_mean(const T* column, std::int64_t stride, int m, int cut) {
  using Real = Compared<T>;
  Run<Real, sizeof(Real)> x[kRows];
  bool nan = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r].stored[0] = r < m ? widen<Real>(column[r * stride]) : infinite<Real>();
#pragma unroll
  for (int r = 0; r < kRows; ++r) nan |= x[r].stored[0] != x[r].stored[0];
  sort<Real, kRows, 0, 0>(x);
  double sum = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= cut && r < m - cut) sum += x[r].stored[0];
  }
  return nan ? static_cast<double>(NAN) : sum / (m - 2 * cut);
}

// Of kBytes of neighbouring columns, as far as there are any.
template <class T, int kRows, int kBytes>
__device__ inline void trim_run(const T* rows, std::int64_t stride, int m, std::int64_t column, std::int64_t columns,
                                int cut, int width, int out_width, T* out) {
  using Columns = Run<T, kBytes>;
  constexpr int kCount = Columns::kCount, kWords = sizeof(Columns) / sizeof(Columns::stored[0]);
  // Of narrow runs there are two ways to load them: each has an instruction per row.
  const int vectors = kBytes > 4 ? width : width >= kBytes ? kBytes : static_cast<int>(sizeof(T));
  Columns x[kRows];
  load_runs(rows, stride, m, column, 0, columns, vectors, x);
#pragma unroll
  for (int r = 1; r < kRows; ++r) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) x[r].stored[w] = r < m ? x[r].stored[w] : infinite<T>();
  }
  bool nan[kCount] = {};
  const auto look = [&](const Columns& own) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      const auto value = own.template get<Compared<T>>(v);
      nan[v] |= value != value;
    }
  };
  if constexpr (sizeof(T) == 2) {
    Columns largest = x[0];
#pragma unroll
    for (int r = 1; r < kRows; ++r) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        largest.stored[w] = Order<T>::larger_or_nan(largest.stored[w], x[r].stored[w]);
      }
    }
    look(largest);
  } else {
#pragma unroll
    for (int r = 0; r < kRows; ++r) look(x[r]);
  }
  sort<T, kRows, 0, 0>(x);
  double sum[kCount] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r < cut || r >= m - cut) continue;
#pragma unroll
    for (int v = 0; v < kCount; ++v) sum[v] += x[r].template get<double>(v);
  }
  T result[kCount];
#pragma unroll
  for (int v = 0; v < kCount; ++v) result[v] = narrow<T>(nan[v] ? static_cast<double>(NAN) : sum[v] / (m - 2 * cut));
  store_run(result, column, 0, columns, out_width, out);
}

// One thread per kBytes of neighbouring columns of up to kRows rows; those that are missing are infinite, and end up
// last.
template <class T, int kRows, int kBytes>
__global__ void __launch_bounds__(kTrimFewThreads)
    trim_few(const T* rows, std::int64_t stride, int m, std::int64_t columns, int cut, T* out) {
  constexpr int kCount = Run<T, kBytes>::kCount;
  const std::int64_t first = aligned_start(rows, 0);
  const std::int64_t column = first + (std::int64_t{blockIdx.x} * kTrimFewThreads + threadIdx.x) * kCount;
  if (column >= columns || column + kCount <= 0) return;
  if constexpr (kCount == 1 || (sizeof(T) == 2 && !kComparesPairs)) {
#pragma unroll 1
    for (std::int64_t c = column < 0 ? 0 : column; c < column + kCount && c < columns; ++c) {
      out[c] = narrow<T>(column_mean<T, kRows>(rows + c, stride, m, cut));
    }
  } else {
    trim_run<T, kRows, kBytes>(rows, stride, m, column, columns, cut, vector_width(rows, stride, first),
                               vector_width<T>(out, 0, first), out);
  }
}

// A block sorts 2^shift columns in shared memory; the exchanges of one stage do not touch each other. Then one thread
// per column adds up the middle in order.
template <class T>
__global__ void __launch_bounds__(kTrimThreads)
    trim(const T* rows, std::int64_t stride, int m, std::int64_t columns, int cut, int shift, T* out) {
  using Real = Compared<T>;
  SHARED(Real, x, kNumbers<T>);
  const int lanes = 1 << shift;
  const std::int64_t first = std::int64_t{blockIdx.x} << shift;
  for (int i = threadIdx.x; i < m << shift; i += kTrimThreads) {
    const std::int64_t column = first + (i & (lanes - 1));
    x[i] = column < columns ? widen<Real>(rows[(i >> shift) * stride + column]) : Real{0};
  }
  __syncthreads();
  for (int log_p = 0; 1 << log_p < m; ++log_p) {
    for (int log_k = log_p; log_k >= 0; --log_k) {
      const int apart = 1 << (log_k + shift);
      for (int i = threadIdx.x; i < (m << shift) - apart; i += kTrimThreads) {
        if (!meets(i >> shift, log_p, log_k)) continue;
        const Real a = x[i], b = x[i + apart];
        x[i] = a < b ? a : b;  // of a NaN and another number none is lost
        x[i + apart] = a < b ? b : a;
      }
      __syncthreads();
    }
  }
  for (int lane = threadIdx.x; lane < lanes && first + lane < columns; lane += kTrimThreads) {
    double sum = 0;
    for (int r = 0; r < m; ++r) {
      const Real value = x[(r << shift) + lane];
      if ((r >= cut && r < m - cut) || value != value) sum += value;  // one NaN makes the whole column NaN
    }
    out[first + lane] = narrow<T>(sum / (m - 2 * cut));
  }
}

// For matrices of up to kRows rows.
template <class T, int kRows>
void launch_few(Matrix rows, int cut, T* out, const Context& context) {
  constexpr int kBytes = trim_bytes(sizeof(T), kRows);
  constexpr std::int64_t kColumns = kTrimFewThreads * kBytes / sizeof(T);  // of a block
  launch(kOp, trim_few<T, kRows, kBytes>, (rows.columns + kRun<T> - 2) / kColumns + 1, kTrimFewThreads, context,
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
    if (rows.columns == 0) return;
    const auto few = [&](auto most) { launch_few<T, most>(rows, cut, out, context); };
    if (with_least(m, std::conditional_t<sizeof(T) == 8, WideTrimSizes, TrimSizes>{}, few)) return;
    int shift = 5;
    while (m << shift > kNumbers<T>) --shift;
    launch(kOp, trim<T>, ((rows.columns - 1) >> shift) + 1, kTrimThreads, context, static_cast<const T*>(rows.data),
           rows.stride, m, rows.columns, cut, shift, out);
  });
}

}  // namespace fl_lightning::cuda
