// SPDX-License-Identifier: Apache-2.0
// The point of least norm in the convex hull of a few rows, with the instructions that suit the processor: what
// min_norm and common_descent share.
#pragma once

#include <cstdint>

#include "../ops.h"

namespace fl_lightning::cpu {

// What one matrix of k rows takes, roughly, in nanoseconds.
double nearest_point_cost(std::int64_t k);

// Matrices that a task takes of so many: one each, or all where starting threads would cost as much as the work.
inline std::int64_t matrices_per_task(std::int64_t batch, std::int64_t k) {
  constexpr double kWorthThreads = 1e6;  // nanoseconds: a hundred small problems
  return static_cast<double>(batch) * nearest_point_cost(k) < kWorthThreads ? batch : 1;
}

// Numbers of scratch memory that nearest_point takes for k rows.
std::int64_t nearest_point_scratch(std::int64_t k);

// See cpu::min_norm; gram [k, k], lam [k], gap [1].
void nearest_point(const double* gram, std::int64_t k, double* lam, double* gap, double* scratch);

}  // namespace fl_lightning::cpu
