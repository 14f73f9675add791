// SPDX-License-Identifier: Apache-2.0
// min_norm for one matrix: scaling, closed forms, searches. Included once per instruction set by every_isa.h.
#include "active_set_kernel.h"

namespace fl_lightning::cpu::FL_ISA {

// The nearest point of a segment; of two equal rows each gets one half.
inline double first_weight(double one, double cross, double two) {
  const double first = two - cross, second = one - cross, length = first + second;
  if (length > 0.0) return smaller(larger(first / length, 0.0), 1.0);
  // Rows that differ by less than the Gram matrix resolves: the shorter one, if there is one.
  return first > second ? 1.0 : first < second ? 0.0 : 0.5;
}

// Searches, and searches again with a ridge where the matrix turned out not to be positive semi-definite.
inline double search(Search& search, double* lam) {
  double best = kInfinity, ridge = 0.0;
  for (int attempt = 0; attempt <= kRidges && (attempt == 0 || best > kEnough); ++attempt) {
    search.add_ridge(ridge);
    search.run();
    search.add_ridge(0.0);
    const double excess = search.excess();
    if (attempt == 0 || excess < best) {
      best = excess;
      for (std::int64_t i = 0; i < search.k; ++i) lam[i] = search.lam[i];
    }
    ridge = attempt == 0 ? kFirstRidge : kNextRidge * ridge;
  }
  return best;
}

// The symmetric part of a matrix times two factors. False where a number is not finite.
inline bool pack(const double* gram, std::int64_t k, double one, double two, Packed to) {
  Doubles finite = broadcast(0.0);  // NaN where something was not
  for (std::int64_t i = 0; i < to.n; i += kDoubles) {
    double* block = to.at(i, i);
    for (std::int64_t r = 0; r < kDoubles; ++r) {
      const double* row = gram + (i + r) * k;
      const std::int64_t real = i + r < k ? k : i;
      for (std::int64_t j = i; j < real; ++j) block[(j - i) * kDoubles + r] = row[j];
      for (std::int64_t j = real; j < to.n; ++j) block[(j - i) * kDoubles + r] = 0.0;
    }
    for (std::int64_t j = i; j < k; ++j) {
      double* lanes = block + (j - i) * kDoubles;
      double edge[kDoubles] = {};
      const double* row = gram + j * k + i;
      if (i + kDoubles > k) {
        for (std::int64_t r = 0; i + r < k; ++r) edge[r] = row[r];
        row = edge;
      }
      const Doubles upper = load(lanes), lower = load(row);
      finite = add(finite, (upper - upper) + (lower - lower));
      store(lanes, upper * broadcast(one) * broadcast(two) + lower * broadcast(one) * broadcast(two));
    }
  }
  return sum(finite) == 0.0;
}

inline void min_norm(const double* gram, std::int64_t k, double* lam, double* gap, double* numbers) {
  // Scaled by a power of two, which is exact, to mean diagonals in [1/2, 1). Two factors: one alone can overflow.
  double mean = 0.0;
  for (std::int64_t i = 0; i < k; ++i) mean += gram[i * k + i] / static_cast<double>(k);
  int exponent = 0;
  if (mean > 0.0 && mean < kInfinity) __builtin_frexp(mean, &exponent);
  const int half = -exponent / 2;
  const double one = __builtin_ldexp(1.0, half), two = __builtin_ldexp(1.0, -exponent - half);
  Search work(k, (k + kDoubles - 1) / kDoubles * kDoubles, numbers);
  if (!pack(gram, k, one, 0.5 * two, work.gram)) {
    for (std::int64_t i = 0; i < k; ++i) lam[i] = __builtin_nan("");
    *gap = __builtin_nan("");
    return;
  }
  mean = mean > 0.0 ? mean * one * two : 1.0;
  for (std::int64_t i = 0; i < k; ++i) work.own[i] = work.gram.diagonal(i);
  if (k <= 2) {
    work.lam[0] = lam[0] = k == 1 ? 1.0 : first_weight(work.own[0], work.gram.at(0, 1)[0], work.own[1]);
    if (k == 2) work.lam[1] = lam[1] = 1.0 - lam[0];
    *gap = work.excess() / mean;
  } else {
    *gap = search(work, lam) / mean;
  }
}

}  // namespace fl_lightning::cpu::FL_ISA
