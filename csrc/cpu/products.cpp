// SPDX-License-Identifier: Apache-2.0
#include "products.h"

#include <algorithm>

#include "pieces.h"

#define FL_KERNEL "products_kernel.h"
#include "kernels/every_isa.h"

namespace fl_lightning::cpu {
namespace {

std::int64_t all_rows(const Products& problem) {
  return problem.rows.rows + (problem.symmetric ? 0 : problem.others.rows);
}

struct Job {
  const Products& problem;
  Pieces pieces;

  static void run(std::int64_t task, void* context) {
    static thread_local ProductsScratch scratch;
    Job& job = *static_cast<Job*>(context);
    job.pieces.run(task, [&job](std::int64_t begin, std::int64_t end, double* out) {
      FL_DISPATCH(products(job.problem, begin, end, out, scratch));
    });
  }
};

}  // namespace

std::int64_t panel_columns(const Products& problem) {
  const auto fitting = [](std::int64_t numbers, std::int64_t rows, std::int64_t most) {
    return std::clamp(numbers / rows / kPanelStep * kPanelStep, kPanelStep, most);
  };
  if (problem.passing()) {
    return fitting(kStripNumbers, std::min(problem.rows.rows, problem.others.rows), kStripMost);
  }
  if (problem.many()) return kManyColumns;
  // With few others each row is read once, and need not stay in the cache.
  const std::int64_t staying = !problem.symmetric && problem.others.rows <= 3 ? problem.others.rows : all_rows(problem);
  return fitting(kPanelNumbers, staying, kPanelMost);
}

void layer_products(const Products& problem, Layers layers, double* out, ParallelFor parallel) {
  if (problem.pairs() == 0) return;
  Job job{problem, Pieces(layers, all_rows(problem), problem.pairs(), out)};
  parallel(job.pieces.tasks(), &Job::run, &job);
  job.pieces.finish();
}

}  // namespace fl_lightning::cpu
