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
  constexpr std::int64_t elements = 96 * 1024;  // 384 KiB: the lesser part of a second-level cache
  constexpr std::int64_t least = 384, most = 3072;
  if (problem.passing()) {
    constexpr std::int64_t strips = 30 * 1024 / 4;  // most of a first-level cache, in float32 numbers
    return std::clamp(strips / std::min(problem.rows.rows, problem.others.rows) / least * least, least, 4 * least);
  }
  if (problem.many()) return 2 * least;
  // With few others each row is read once, and need not stay in the cache.
  const std::int64_t staying = !problem.symmetric && problem.others.rows <= 3 ? problem.others.rows : all_rows(problem);
  return std::clamp(elements / staying / least * least, least, most);
}

void layer_products(const Products& problem, Layers layers, double* out, ParallelFor parallel) {
  if (problem.pairs() == 0) return;
  Job job{problem, Pieces(layers, all_rows(problem), problem.pairs(), out)};
  parallel(job.pieces.tasks(), &Job::run, &job);
  job.pieces.finish();
}

}  // namespace fl_lightning::cpu
