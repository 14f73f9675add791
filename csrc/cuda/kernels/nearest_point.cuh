// SPDX-License-Identifier: Apache-2.0
// The point of least norm in the convex hull of a few rows, by one block: scaling, the closed form, searches. What
// min_norm and common_descent share.
#pragma once

#include "active_set.cuh"

namespace fl_lightning::cuda {

// What one matrix of a search takes: threads of its block, and bytes of shared memory. 0 where it does not offer as
// many as the numbers take, which are in scratch memory then.
struct SearchShape {
  int threads;
  std::int64_t shared_bytes;
};
inline SearchShape search_shape(std::int64_t k) {
  const std::int64_t bytes = search_size(k) * static_cast<std::int64_t>(sizeof(double));
  return {k <= kFewSearchRows ? kFewSearchThreads : kSearchThreads, bytes <= most_shared_bytes() ? bytes : 0};
}

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

// The power of two that brings the mean diagonal of a matrix to [1/2, 1), which is exact; and what the mean is then.
struct PowerOfTwo {
  int exponent;
  double mean;
};
__device__ inline PowerOfTwo power_of_two(double mean) {
  int exponent = 0;
  if (!(mean > 0.0)) return {0, 1.0};
  frexp(mean, &exponent);
  return {-exponent, ldexp(mean, -exponent)};
}

// Of a finite, symmetric, scaled matrix; how far it is from optimal. Ends with a barrier.
template <bool kShared, class Moves>
__device__ inline double nearest_point(int k, const double* gram, double* numbers, Moves moves, double* lam) {
  if constexpr (kShared) {
    SHARED_OF_LAUNCH(double, pool);
    auto search = Search(k, gram, +pool, moves);
    if (k != 2) return best_of(search, lam);
    if (threadIdx.x == 0) lam[0] = search.lam[0] = first_weight(gram);
    if (threadIdx.x == 0) lam[1] = search.lam[1] = 1.0 - first_weight(gram);
    __syncthreads();
    return search.excess();
  } else {
    auto search = Search(k, gram, numbers, moves);
    return best_of(search, lam);
  }
}

}  // namespace fl_lightning::cuda
