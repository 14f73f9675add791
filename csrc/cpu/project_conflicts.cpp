// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "../tiles.h"

#define FL_KERNEL "project_conflicts_kernel.h"
#include "kernels/every_isa.h"

namespace fl_lightning::cpu {
namespace {

// Tasks are stretches of rows of [batch, m]: each update is projected by itself.
struct Job {
  const double* gram;
  std::int64_t batch, m;
  const std::int64_t* order;
  const bool* keep;
  double* coeff;
  std::int64_t each;

  static void run(std::int64_t task, void* context) {
    static thread_local Scratch scratch;
    const Job& job = *static_cast<const Job*>(context);
    const std::int64_t m = job.m, end = std::min((task + 1) * job.each, job.batch * m);
    double* products = static_cast<double*>(scratch.reserve(m * static_cast<std::int64_t>(sizeof(double))));
    for (std::int64_t row = task * job.each; row < end; ++row) {
      const std::int64_t i = row % m;
      const double* gram = job.gram + (row - i) * m;
      FL_DISPATCH(project(gram, m, job.order, job.keep[i], i, products, job.coeff + row * m));
    }
  }
};

}  // namespace

void project_conflicts(const double* gram, std::int64_t batch, std::int64_t m, const std::int64_t* order,
                       const bool* keep, double* coeff, ParallelFor parallel) {
  if (batch == 0 || m == 0) return;
  const std::int64_t each = std::max<std::int64_t>(kTaskProducts / (m * m), 1);
  Job job{gram, batch, m, order, keep, coeff, each};
  parallel((batch * m + each - 1) / each, &Job::run, &job);
}

}  // namespace fl_lightning::cpu
