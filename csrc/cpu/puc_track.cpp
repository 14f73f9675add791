// SPDX-License-Identifier: Apache-2.0
#include "pieces.h"

#define FL_KERNEL "puc_track_kernel.h"
#include "kernels/every_isa.h"

namespace fl_lightning::cpu {
namespace {

static_assert(kLeastSlice % 32 == 0, "two tasks never write to the same word of bits");

struct Job {
  PucTrack problem;
  Pieces pieces;

  static void run(std::int64_t task, void* context) {
    Job& job = *static_cast<Job*>(context);
    job.pieces.run(task, [&job](std::int64_t begin, std::int64_t end, double* norm) {
      FL_DISPATCH(track(job.problem, begin, end, norm));
    });
  }
};

}  // namespace

void puc_track(Matrix row, void* counts, CountType type, std::int64_t threshold, std::int64_t participations,
               Layers layers, std::int32_t* keep, double* norms, ParallelFor parallel) {
  Job job{{row.data, row.dtype, counts, type, threshold, participations - threshold, keep},
          Pieces(layers, 1, 1, norms)};
  parallel(job.pieces.tasks(), &Job::run, &job);
  job.pieces.finish();
}

}  // namespace fl_lightning::cpu
