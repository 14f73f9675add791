// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "../active_set.h"
#include "nearest_point.h"

#define FL_KERNEL "min_norm_kernel.h"
#include "kernels/every_isa.h"

namespace fl_lightning::cpu {
namespace {

constexpr std::int64_t kLanes = 8;  // of the widest vectors

struct Job {
  const double* gram;
  std::int64_t batch, k;
  double *lam, *gap;
  std::int64_t each;  // matrices per task

  static void run(std::int64_t task, void* context) {
    static thread_local Scratch scratch;
    const Job& job = *static_cast<const Job*>(context);
    const std::int64_t k = job.k, bytes = nearest_point_scratch(k) * static_cast<std::int64_t>(sizeof(double));
    double* space = static_cast<double*>(scratch.reserve(bytes));
    for (std::int64_t i = task * job.each; i < std::min((task + 1) * job.each, job.batch); ++i) {
      nearest_point(job.gram + i * k * k, k, job.lam + i * k, job.gap + i, space);
    }
  }
};

}  // namespace

double nearest_point_cost(std::int64_t k) {
  const double rows = static_cast<double>(k);
  return rows * (90.0 + rows * (1.5 + 0.03 * rows));
}

// With any instruction set: two packed matrices, vectors, and kLanes sums per row.
std::int64_t nearest_point_scratch(std::int64_t k) {
  const std::int64_t n = (k + kLanes - 1) / kLanes * kLanes;
  return n * (n + kLanes) + n * base::kVectors + n * kLanes;
}

void nearest_point(const double* gram, std::int64_t k, double* lam, double* gap, double* scratch) {
  FL_DISPATCH(min_norm(gram, k, lam, gap, scratch));
}

void min_norm(const double* gram, std::int64_t batch, std::int64_t k, double* lam, double* gap, ParallelFor parallel) {
  if (batch == 0 || k == 0) return;
  Job job{gram, batch, k, lam, gap, matrices_per_task(batch, k)};
  parallel((batch + job.each - 1) / job.each, &Job::run, &job);
}

}  // namespace fl_lightning::cpu
