// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "large_outputs.h"

#define FL_KERNEL "puc_combine_kernel.h"
#include "kernels/every_isa.h"

namespace fl_lightning::cpu {
namespace {

void run(std::int64_t task, void* context) {
  static thread_local Scratch scratch;
  const PucCombine& problem = *static_cast<const PucCombine*>(context);
  double* sums = static_cast<double*>(scratch.reserve(2 * kBlockColumns * static_cast<std::int64_t>(sizeof(double))));
  const std::int64_t begin = task * kBlockColumns, end = std::min(begin + kBlockColumns, problem.rows.columns);
  FL_DISPATCH(kept_means(problem, begin, end, sums));
}

}  // namespace

void puc_combine(Matrix rows, const std::int32_t* keep, const double* weights, void* out, ParallelFor parallel) {
  const bool large = beyond_cache(rows);
  if (large) ask_for_large_pages(out, rows.columns * size_of(rows.dtype));
  PucCombine problem{rows, keep, weights, out, large};
  parallel((rows.columns + kBlockColumns - 1) / kBlockColumns, &run, &problem);
}

}  // namespace fl_lightning::cpu
