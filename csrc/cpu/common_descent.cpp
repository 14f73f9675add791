// SPDX-License-Identifier: Apache-2.0
// What surrounds the search is a few passes over a small matrix: plain code does.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/scratch.h"
#include "nearest_point.h"

namespace fl_lightning::cpu {
namespace {

constexpr std::int64_t kVectors = 6;

double lower_median_of_nonzero(const double* lengths, std::int64_t count, double* room) {
  double* const last = std::copy_if(lengths, lengths + count, room, [](double x) { return x != 0.0; });
  if (last == room) return std::numeric_limits<double>::infinity();
  double* const middle = room + (last - room - 1) / 2;
  std::nth_element(room, middle, last);
  return *middle;
}

double dot(const double* a, const double* b, std::int64_t n) {
  double total = 0.0;
  for (std::int64_t i = 0; i < n; ++i) total += a[i] * b[i];
  return total;
}

bool finite(const double* x, std::int64_t n) {
  double odd = 0.0;  // NaN where something was not
  for (std::int64_t i = 0; i < n; ++i) odd += x[i] - x[i];
  return odd == 0.0;
}

// One matrix and the memory it is worked on in.
struct Problem {
  const Descent& descent;
  std::int64_t k;
  const double* gram;
  double *norm, *scale, *fair, *product, *lam, *coeff, *hull, *search;
  double mean = 0.0;  // length of the online rows that count

  static std::int64_t scratch(std::int64_t k) {
    return kVectors * (k + 1) + (k + 1) * (k + 1) + nearest_point_scratch(k + 1);
  }

  // product = G x.
  void multiply(const double* x) const {
    std::fill_n(product, k, 0.0);
    for (std::int64_t j = 0; j < k; ++j) {
      for (std::int64_t i = 0; i < k; ++i) product[i] += gram[j * k + i] * x[j];
    }
  }

  // Rows that count as long as the mean of those that are online.
  void equal_lengths() {
    const double least = descent.zero_row * lower_median_of_nonzero(norm, descent.online, product);
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < descent.online; ++i) {
      if (!(norm[i] > least)) continue;
      mean += norm[i];
      ++count;
    }
    if (count > 0) mean /= static_cast<double>(count);
    for (std::int64_t i = 0; i < k; ++i) scale[i] = norm[i] > least ? mean / norm[i] : 0.0;
  }

  // Coefficients of the fair row; whether there is one. Leaves G times them in product.
  bool add_fair_row(bool equal) {
    std::fill_n(fair, k, 0.0);
    if (descent.weights == nullptr) return false;
    for (std::int64_t i = 0; i < descent.online; ++i) fair[i] = descent.weights[i] * scale[i];
    multiply(fair);
    if (equal) {
      const double length = std::sqrt(std::max(dot(fair, product, k), 0.0));
      const double least = descent.zero_direction * std::sqrt(dot(descent.weights, descent.weights, descent.online));
      const double factor = length > least * mean ? mean / length : 0.0;
      for (std::int64_t i = 0; i < k; ++i) {
        fair[i] *= factor;
        product[i] *= factor;
      }
    }
    return std::any_of(fair, fair + k, [](double x) { return x != 0.0; });
  }

  // The shortest vector in the hull of the rows that are left.
  void solve(bool with_fair_row) {
    std::int64_t rows = with_fair_row;
    for (std::int64_t i = 0; i < k; ++i) rows += scale[i] != 0.0;
    double* to = hull;
    for (std::int64_t i = 0; i < k; ++i) {
      if (scale[i] == 0.0) continue;
      for (std::int64_t j = 0; j < k; ++j) {
        if (scale[j] != 0.0) *to++ = (0.5 * gram[i * k + j] + 0.5 * gram[j * k + i]) * scale[i] * scale[j];
      }
      if (with_fair_row) *to++ = scale[i] * product[i];
    }
    for (std::int64_t i = 0; with_fair_row && i < k; ++i) {
      if (scale[i] != 0.0) *to++ = scale[i] * product[i];
    }
    if (with_fair_row) *to = dot(fair, product, k);
    double gap;
    nearest_point(hull, rows, lam, &gap, search);
    if (std::isnan(gap)) std::fill_n(scale, k, gap);  // the hull has a number that is not finite
    const double* share = lam;
    for (std::int64_t i = 0; i < k; ++i) coeff[i] = scale[i] == 0.0 ? 0.0 : scale[i] * *share++;
    for (std::int64_t i = 0; with_fair_row && i < k; ++i) coeff[i] += *share * fair[i];
  }

  // Whether the direction is long enough, and falls for everybody by more than rounding can turn around.
  bool holds(std::int64_t live) const {
    multiply(coeff);
    double squares = 0.0, size = 0.0;
    for (std::int64_t i = 0; i < descent.online; ++i) squares += scale[i] * norm[i] * (scale[i] * norm[i]);
    for (std::int64_t i = 0; i < k; ++i) size += std::fabs(coeff[i]) * norm[i];
    const double least = descent.zero_direction * descent.zero_direction * squares / static_cast<double>(live);
    bool falls = dot(coeff, product, k) > least;
    for (std::int64_t i = 0; i < descent.online; ++i) {
      falls &= scale[i] == 0.0 || product[i] > descent.rounding * norm[i] * size;
    }
    return falls;
  }

  void run(const double* given, bool* solved, bool* has_fair_row) {
    *solved = *has_fair_row = false;
    const bool known = descent.weights == nullptr || finite(descent.weights, descent.online);
    if (!known || !finite(gram, k * k) || (given != nullptr && !finite(given, k))) {
      std::fill_n(coeff, k, std::numeric_limits<double>::quiet_NaN());
      return;
    }
    for (std::int64_t i = 0; i < k; ++i) norm[i] = std::sqrt(std::max(gram[i * k + i], 0.0));
    if (given != nullptr) {
      std::copy_n(given, k, scale);
    } else {
      equal_lengths();
    }
    *has_fair_row = add_fair_row(given == nullptr);
    const std::int64_t live = descent.online - std::count(scale, scale + descent.online, 0.0);
    if (live == 0) {
      std::fill_n(coeff, k, 0.0);
      *solved = true;
      return;
    }
    solve(*has_fair_row);
    *solved = holds(live);
  }
};

struct Job {
  Descent descent;
  const double *gram, *scale;
  std::int64_t batch, k;
  double* coeff;
  bool *solved, *fair;
  std::int64_t each;  // matrices per task

  static void run(std::int64_t task, void* context) {
    static thread_local Scratch scratch;
    const Job& job = *static_cast<const Job*>(context);
    const std::int64_t k = job.k, bytes = Problem::scratch(k) * static_cast<std::int64_t>(sizeof(double));
    double* space = static_cast<double*>(scratch.reserve(bytes));
    const auto vector = [&](std::int64_t number) { return space + number * (k + 1); };
    double *hull = vector(kVectors), *search = hull + (k + 1) * (k + 1);
    for (std::int64_t i = task * job.each; i < std::min((task + 1) * job.each, job.batch); ++i) {
      Problem problem{job.descent, k,         job.gram + i * k * k, vector(0), vector(1), vector(2),
                      vector(3),   vector(4), job.coeff + i * k,    hull,      search};
      problem.run(job.scale == nullptr ? nullptr : job.scale + i * k, job.solved + i, job.fair + i);
    }
  }
};

}  // namespace

void common_descent(Descent descent, const double* gram, const double* scale, std::int64_t batch, std::int64_t k,
                    double* coeff, bool* solved, bool* fair, ParallelFor parallel) {
  if (batch == 0) return;
  Job job{descent, gram, scale, batch, k, coeff, solved, fair, matrices_per_task(batch, k + 1)};
  parallel((batch + job.each - 1) / job.each, &Job::run, &job);
}

}  // namespace fl_lightning::cpu
