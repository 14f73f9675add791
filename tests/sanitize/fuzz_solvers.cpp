// SPDX-License-Identifier: Apache-2.0
// The ops on batches of Gram matrices: projections against a plain loop, points of least norm by their optimality.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "fuzz.h"

namespace fuzz {
namespace {

namespace cpu = fl_lightning::cpu;

// How a Gram matrix comes about; the first ones belong to real vectors.
enum class Gram { normal, whole, spread, low_rank, indefinite, broken };

Gram any_gram() { return static_cast<Gram>(between(0, 5)); }
bool of_vectors(Gram kind) { return kind != Gram::indefinite && kind != Gram::broken; }

// Fills [m, m]; the vectors may be equal, dependent, zero, long and short.
void fill(double* gram, int64_t m, Gram kind) {
  const int64_t n = kind == Gram::low_rank ? between(1, m) : between(m, 2 * m);
  std::vector<double> vectors(static_cast<std::size_t>(m * n));
  for (int64_t i = 0; i < m; ++i) {
    const double scale =
        kind == Gram::spread ? std::pow(10.0, 6.0 * static_cast<double>(between(0, 100)) / 100.0) : 1.0;
    const int64_t copied = kind == Gram::whole && i > 0 && one_in(3) ? between(0, i - 1) : -1;
    for (int64_t c = 0; c < n; ++c) {
      const double fresh = kind == Gram::whole ? static_cast<double>(between(-2, 2)) : scale * normal();
      vectors[static_cast<std::size_t>(i * n + c)] =
          copied >= 0 ? vectors[static_cast<std::size_t>(copied * n + c)] : fresh;
    }
  }
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      const double* vector = vectors.data();
      double total = std::inner_product(vector + i * n, vector + (i + 1) * n, vector + j * n, 0.0);
      if (kind == Gram::indefinite) total = normal();
      gram[i * m + j] = gram[j * m + i] = total;
    }
  }
  if (kind != Gram::broken) return;
  for (int64_t i = between(1, 3); i > 0; --i) {
    const double values[] = {NAN, INFINITY, -INFINITY, 1.7e308, -1.7e308, 5e-324};
    gram[between(0, m * m - 1)] = values[between(0, 5)];
  }
}

bool finite(const double* numbers, int64_t count) {
  return std::all_of(numbers, numbers + count, [](double x) { return std::isfinite(x); });
}

// FedFV's projections of one update, on products with the original updates.
std::vector<double> projected(const double* gram, int64_t m, int64_t i, const int64_t* order) {
  std::vector<double> coeff(static_cast<std::size_t>(m)), products(gram + i * m, gram + (i + 1) * m);
  coeff[static_cast<std::size_t>(i)] = 1;
  for (int64_t position = 0; position < m; ++position) {
    const int64_t j = order[position];
    const double square = gram[j * m + j], product = products[static_cast<std::size_t>(j)];
    if (j == i || !(square > 0) || !(product < 0)) continue;
    coeff[static_cast<std::size_t>(j)] -= product / square;
    for (int64_t k = 0; k < m; ++k) products[static_cast<std::size_t>(k)] -= product / square * gram[j * m + k];
  }
  return coeff;
}

// A number that no power of two of the matrix changes; 0 for a matrix that is all zeros.
double mean_diagonal(const double* gram, int64_t k) {
  double total = 0;
  for (int64_t i = 0; i < k; ++i) total += gram[i * k + i] / static_cast<double>(k);
  return total;
}

// By how much the point is not optimal: max_j (lam' G lam - (G lam)_j). No other point of the hull is shorter by more.
double excess(const double* gram, int64_t k, const double* lam) {
  double value = 0, least = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < k; ++i) {
    const double slope = std::inner_product(lam, lam + k, gram + i * k, 0.0);
    value += lam[i] * slope;
    least = std::min(least, slope);
  }
  return std::max(value - least, 0.0);
}

}  // namespace

int64_t project_conflicts() {
  const int64_t m = any_rows(), batch = one_in(40) ? 60 : between(0, 4);
  describe("project_conflicts", m, batch);
  Buffer gram(batch * m * m, 8), order(m, 8), keep(m, 1), coeff(batch * m * m, 8);
  std::vector<Gram> kinds;
  for (int64_t b = 0; b < batch; ++b) fill(gram.as<double>() + b * m * m, m, kinds.emplace_back(any_gram()));
  std::iota(order.as<int64_t>(), order.as<int64_t>() + m, 0);
  for (int64_t i = m - 1; i > 0; --i) std::swap(order.as<int64_t>()[i], order.as<int64_t>()[between(0, i)]);
  for (int64_t i = 0; i < m; ++i) keep.as<bool>()[i] = one_in(4);
  same_bits_twice({&coeff}, [&](ParallelFor parallel) {
    cpu::project_conflicts(gram.as<double>(), batch, m, order.as<int64_t>(), keep.as<bool>(), coeff.as<double>(),
                           parallel);
  });
  for (int64_t row = 0; row < batch * m; ++row) {
    const int64_t i = row % m;
    const double *own = gram.as<double>() + (row - i) * m, *found = coeff.as<double>() + row * m;
    if (keep.as<bool>()[i]) {
      for (int64_t j = 0; j < m; ++j) check("coeff", row * m + j, found[j], i == j);
    } else if (of_vectors(kinds[static_cast<std::size_t>(row / m)])) {
      const std::vector<double> wanted = projected(own, m, i, order.as<int64_t>());
      double size = 0;
      for (const double x : wanted) size += std::fabs(x);
      // A product of zero may come out on either side of it, which changes little.
      for (int64_t j = 0; j < m; ++j)
        check_close("coeff", row * m + j, found[j], wanted[static_cast<std::size_t>(j)], 1e-9 * size);
    }
  }
  return 2;
}

int64_t min_norm() {
  const int64_t k = any_rows(), batch = one_in(40) ? 60 : between(0, 4);
  describe("min_norm", k, batch);
  Buffer gram(batch * k * k, 8), lam(batch * k, 8), gap(batch, 8);
  std::vector<Gram> kinds;
  for (int64_t b = 0; b < batch; ++b) {
    double* own = gram.as<double>() + b * k * k;
    fill(own, k, kinds.emplace_back(any_gram()));
    const double scale =
        of_vectors(kinds.back()) && one_in(4) ? std::ldexp(1.0, static_cast<int>(between(-900, 900))) : 1.0;
    for (int64_t e = 0; e < k * k; ++e) own[e] *= scale;
  }
  same_bits_twice({&lam, &gap}, [&](ParallelFor parallel) {
    cpu::min_norm(gram.as<double>(), batch, k, lam.as<double>(), gap.as<double>(), parallel);
  });
  for (int64_t b = 0; b < batch; ++b) {
    const double *own = gram.as<double>() + b * k * k, *point = lam.as<double>() + b * k, off = gap.as<double>()[b];
    const Gram kind = kinds[static_cast<std::size_t>(b)];
    if (!finite(own, k * k)) {
      check("isnan(gap)", b, std::isnan(off), 1);
      for (int64_t i = 0; i < k; ++i) check("isnan(lam)", b * k + i, std::isnan(point[i]), 1);
      continue;
    }
    check("gap >= 0", b, off >= 0, 1);
    check_close("sum of lam", b, std::accumulate(point, point + k, 0.0), 1, 1e-12);
    for (int64_t i = 0; i < k; ++i) check("lam >= 0", b * k + i, point[i] >= 0, 1);
    if (!of_vectors(kind)) continue;
    const double mean = mean_diagonal(own, k);
    if (mean == 0) continue;
    const double bound = kind == Gram::spread ? 1e-9 : 1e-10;
    check_close("gap", b, off, 0, bound);
    check_close("gap / what it is", b, off, excess(own, k, point) / mean, 1e-13 * static_cast<double>(k));
  }
  return 2;
}

// Directions are judged by what makes a point of a hull the shortest: no vector of the hull has a smaller product with
// it.
int64_t common_descent() {
  const int64_t k = any_rows(), batch = one_in(40) ? 60 : between(0, 4), online = between(1, k);
  describe("common_descent", k, batch);
  Buffer gram(batch * k * k, 8), scale(batch * k, 8), weights(online, 8), coeff(batch * k, 8);
  Buffer solved(batch, 1), fair(batch, 1);
  std::vector<Gram> kinds;
  for (int64_t b = 0; b < batch; ++b) fill(gram.as<double>() + b * k * k, k, kinds.emplace_back(any_gram()));
  for (int64_t i = 0; i < batch * k; ++i) scale.as<double>()[i] = one_in(4) ? 0.0 : std::exp(normal());
  for (int64_t i = 0; i < online; ++i) weights.as<double>()[i] = one_in(200) ? NAN : normal();
  const bool equal = one_in(2), weighted = one_in(2);
  const fl_lightning::Descent descent{online, weighted ? weights.as<double>() : nullptr, 1e-8, 1e-4, 1e-15};
  same_bits_twice({&coeff, &solved, &fair}, [&](ParallelFor parallel) {
    cpu::common_descent(descent, gram.as<double>(), equal ? nullptr : scale.as<double>(), batch, k, coeff.as<double>(),
                        solved.as<bool>(), fair.as<bool>(), parallel);
  });
  const bool known = !weighted || finite(weights.as<double>(), online);
  for (int64_t b = 0; b < batch; ++b) {
    const double *own = gram.as<double>() + b * k * k, *found = coeff.as<double>() + b * k;
    if (!known || !finite(own, k * k)) {
      check("solved", b, solved.as<bool>()[b], 0);
      check("fair", b, fair.as<bool>()[b], 0);
      for (int64_t i = 0; i < k; ++i) check("isnan(coeff)", b * k + i, std::isnan(found[i]), 1);
      continue;
    }
    if (!weighted) check("fair", b, fair.as<bool>()[b], 0);
    if (kinds[static_cast<std::size_t>(b)] == Gram::indefinite || kinds[static_cast<std::size_t>(b)] == Gram::broken) {
      continue;
    }
    std::vector<double> factors(scale.as<double>() + b * k, scale.as<double>() + (b + 1) * k), lengths;
    const auto length = [&](int64_t i) { return std::sqrt(own[i * k + i]); };
    if (equal) {
      for (int64_t i = 0; i < online; ++i) {
        if (length(i) != 0) lengths.push_back(length(i));
      }
      std::sort(lengths.begin(), lengths.end());
      const double usual = lengths.empty() ? INFINITY : lengths[(lengths.size() - 1) / 2];
      double total = 0, count = 0;
      for (int64_t i = 0; i < online; ++i) {
        if (length(i) > 1e-8 * usual) total += length(i), ++count;
      }
      for (int64_t i = 0; i < k; ++i) {
        factors[static_cast<std::size_t>(i)] = length(i) > 1e-8 * usual ? total / count / length(i) : 0;
      }
    }
    const bool there = std::any_of(factors.begin(), factors.begin() + online, [](double x) { return x != 0; });
    double square = 0, longest = 0;
    std::vector<double> products(static_cast<std::size_t>(k));
    for (int64_t i = 0; i < k; ++i) {
      if (!there || factors[static_cast<std::size_t>(i)] == 0.0) {
        // Also where the fair row takes part: it is made of rows that count.
        check("coeff of a row left out", b * k + i, found[i], 0);
      }
      products[static_cast<std::size_t>(i)] = std::inner_product(found, found + k, own + i * k, 0.0);
      square += found[i] * products[static_cast<std::size_t>(i)];
      longest = std::max(longest, factors[static_cast<std::size_t>(i)] * length(i));
    }
    if (!there) check("solved", b, solved.as<bool>()[b], 1);
    for (int64_t i = 0; there && i < k; ++i) {
      const double factor = factors[static_cast<std::size_t>(i)];
      if (factor == 0) continue;
      const double above = factor * products[static_cast<std::size_t>(i)] - square;
      check_close("how far a row is behind", b * k + i, std::min(above, 0.0), 0, 1e-9 * longest * longest);
      const bool falls = i >= online || products[static_cast<std::size_t>(i)] > 0;
      if (solved.as<bool>()[b]) check("falls", b * k + i, falls, 1);
    }
  }
  return 2;
}

}  // namespace fuzz
