// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "large_outputs.h"
#include "pieces.h"

#define FL_KERNEL "layer_combine_kernel.h"
#include "kernels/every_isa.h"

namespace fl_lightning::cpu {
namespace {

// One or two matrices side by side.
struct Job {
  Combine combine;
  Matrix rows, others;
  Layers layers;
  const double* coeff;
  bool skip;  // rows whose coefficient is 0
  std::int64_t width;

  static void run(std::int64_t task, void* context) {
    static thread_local Scratch scratch;
    const Job& job = *static_cast<const Job*>(context);
    static thread_local std::vector<const void*> rows;
    static thread_local std::vector<double> coeff;
    double* sums = static_cast<double*>(scratch.reserve(kBlockColumns * static_cast<std::int64_t>(sizeof(double))));
    const std::int64_t *offsets = job.layers.offsets, count = job.layers.count;
    const std::int64_t begin = task * job.width, end = std::min(begin + job.width, job.rows.columns);
    std::int64_t layer = std::upper_bound(offsets, offsets + count + 1, begin) - offsets - 1;
    for (; layer < count && offsets[layer] < end; ++layer) {
      const std::int64_t from = std::max(begin, offsets[layer]), to = std::min(end, offsets[layer + 1]);
      if (from >= to) continue;
      rows.clear();
      coeff.clear();
      const double* own = job.coeff + layer * (job.rows.rows + job.others.rows);
      job.collect(job.rows, own, rows, coeff);
      job.collect(job.others, own + job.rows.rows, rows, coeff);
      const Terms terms{rows.data(), coeff.data(), static_cast<std::int64_t>(rows.size())};
      FL_DISPATCH(combine(job.combine, terms, from, to, sums));
    }
  }

  void collect(const Matrix& from, const double* own, std::vector<const void*>& to,
               std::vector<double>& factors) const {
    for (std::int64_t r = 0; r < from.rows; ++r) {
      if (skip && own[r] == 0.0) continue;
      to.push_back(static_cast<const char*>(from.data) + r * from.stride * size_of(from.dtype));
      factors.push_back(own[r]);
    }
  }
};

}  // namespace

void layer_combine(Matrix rows, Layers layers, const double* coeff, void* out, bool add, ParallelFor parallel) {
  const bool large = !add && beyond_cache(rows);
  if (large) ask_for_large_pages(out, rows.columns * size_of(rows.dtype));
  const Matrix none{nullptr, 0, rows.columns, 0, rows.dtype};
  Job job{{rows.dtype, out, add, large}, rows, none, layers, coeff, false, task_columns(rows.rows)};
  parallel((rows.columns + job.width - 1) / job.width, &Job::run, &job);
}

void layer_cross_combine(Matrix rows, Matrix others, Layers layers, const double* coeff, void* out,
                         ParallelFor parallel) {
  const bool large = beyond_cache(rows) || beyond_cache(others);
  if (large) ask_for_large_pages(out, rows.columns * size_of(rows.dtype));
  const std::int64_t width = task_columns(rows.rows + others.rows);
  Job job{{rows.dtype, out, false, large}, rows, others, layers, coeff, true, width};
  parallel((rows.columns + width - 1) / width, &Job::run, &job);
}

}  // namespace fl_lightning::cpu
