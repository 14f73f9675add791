// SPDX-License-Identifier: Apache-2.0
#include "kernels/active_set.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "min_norm";
constexpr int kThreads = 128, kManyThreads = 512;
constexpr std::int64_t kSharedNumbers = 6000;  // of the 48 KB that every device offers

// Of two rows: the nearest point of a segment; of two equal rows each gets one half.
__device__ inline double first_weight(const double* gram) {
  const double first = gram[3] - gram[1], second = gram[0] - gram[1], length = first + second;
  if (length > 0.0) return fmin(fmax(first / length, 0.0), 1.0);
  // Rows that differ by less than the Gram matrix resolves: the shorter one, if there is one.
  return first > second ? 1.0 : first < second ? 0.0 : 0.5;
}

// Searches, and searches again with a ridge where the matrix turned out not to be positive semi-definite.
template <class Storage, class Moves>
__device__ inline double best_of(Search<Storage, Moves>& search, double* lam) {
  double best = INFINITY, ridge = 0.0;
  for (int attempt = 0; attempt <= kRidges && best > kEnough; ++attempt) {
    search.run(ridge);
    const double excess = search.excess();
    if (attempt == 0 || excess < best) {
      best = excess;
      for (int i = threadIdx.x; i < search.k; i += blockDim.x) lam[i] = search.lam[i];
    }
    __syncthreads();
    ridge = attempt == 0 ? kFirstRidge : kNextRidge * ridge;
  }
  return best;
}

// One block per matrix.
template <bool kShared>
__global__ void __launch_bounds__(kShared ? kThreads : kManyThreads, 1)
    solve(const double* grams, int k, double* scaled, double* numbers, double* lams, double* gaps) {
  const std::int64_t matrix = blockIdx.x;
  const double* gram = grams + matrix * k * k;
  double *own = scaled + matrix * k * k, *lam = lams + matrix * k;
  int bad = 0;
  for (int e = threadIdx.x; e < k * k; e += blockDim.x) bad |= !isfinite(gram[e]);
  if (__syncthreads_or(bad)) {
    for (int i = threadIdx.x; i < k; i += blockDim.x) lam[i] = NAN;
    if (threadIdx.x == 0) gaps[matrix] = NAN;
    return;
  }
  // Scaled by a power of two, which is exact, to mean diagonals in [1/2, 1); made exactly symmetric.
  double mean = 0.0;
  for (int i = threadIdx.x % kWarp; i < k; i += kWarp) mean += gram[i * k + i] / k;
  mean = warp_sum(mean);
  int exponent = 0;
  if (mean > 0.0) frexp(mean, &exponent);
  mean = mean > 0.0 ? ldexp(mean, -exponent) : 1.0;
  for (int e = threadIdx.x; e < k * k; e += blockDim.x) {
    const int i = e / k, j = e % k;
    own[e] = 0.5 * ldexp(gram[e], -exponent) + 0.5 * ldexp(gram[j * k + i], -exponent);
  }
  __syncthreads();

  SHARED(int, moves, 4);
  double excess;
  if constexpr (kShared) {
    SHARED(double, pool, kSharedNumbers);
    auto search = Search(k, own, +pool, +moves);
    if (k == 2) {
      if (threadIdx.x == 0) lam[0] = search.lam[0] = first_weight(own);
      if (threadIdx.x == 0) lam[1] = search.lam[1] = 1.0 - first_weight(own);
      __syncthreads();
      excess = search.excess();
    } else {
      excess = best_of(search, lam);
    }
  } else {
    auto search = Search(k, own, numbers + matrix * search_size(k), +moves);
    excess = best_of(search, lam);
  }
  if (threadIdx.x == 0) gaps[matrix] = excess / mean;
}

}  // namespace

void min_norm(const double* gram, std::int64_t batch, std::int64_t k, double* lam, double* gap, Context context) {
  if (k >= 32768) throw std::runtime_error("fl_lightning::min_norm takes up to 32767 rows, found " + std::to_string(k));
  const bool small = search_size(k) <= kSharedNumbers;
  double* scaled = scratch<double>(context, batch * k * k);
  double* numbers = small ? nullptr : scratch<double>(context, batch * search_size(k));
  launch(kOp, small ? solve<true> : solve<false>, batch, small ? kThreads : kManyThreads, context, gram,
         static_cast<int>(k), scaled, numbers, lam, gap);
}

}  // namespace fl_lightning::cuda
