// SPDX-License-Identifier: Apache-2.0
#include "dispatch.h"
#include "large_pages.h"
#include "streams.h"

#define FL_KERNEL "combine_kernel.h"
#include "every_isa.h"

namespace fl_lightning::cpu {
namespace {

struct Job {
  Combine combine;
  Layers layers;
  std::int64_t width;

  static void run(std::int64_t task, void* context) {
    static thread_local Scratch scratch;
    const Job& job = *static_cast<const Job*>(context);
    double* sums = static_cast<double*>(scratch.reserve(kBlockColumns * static_cast<std::int64_t>(sizeof(double))));
    const std::int64_t *offsets = job.layers.offsets, count = job.layers.count, m = job.combine.rows.rows;
    const std::int64_t begin = task * job.width, end = std::min(begin + job.width, job.combine.rows.columns);
    std::int64_t layer = std::upper_bound(offsets, offsets + count + 1, begin) - offsets - 1;
    for (; layer < count && offsets[layer] < end; ++layer) {
      const std::int64_t from = std::max(begin, offsets[layer]), to = std::min(end, offsets[layer + 1]);
      if (from < to) FL_DISPATCH(combine(job.combine, job.combine.coeff + layer * m, from, to, sums));
    }
  }
};

}  // namespace

void layer_combine(Matrix rows, Layers layers, const double* coeff, void* out, bool add, ParallelFor parallel) {
  const bool large = !add && beyond_cache(rows);
  if (large) ask_for_large_pages(out, rows.columns * size_of(rows.dtype));
  Job job{{rows, coeff, out, add, large}, layers, task_columns(rows.rows)};
  parallel((rows.columns + job.width - 1) / job.width, &Job::run, &job);
}

}  // namespace fl_lightning::cpu
