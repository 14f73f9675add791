// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#define FL_KERNEL "trimmed_mean_kernel.h"
#include "kernels/every_isa.h"

namespace fl_lightning::cpu {
namespace {

struct Work {
  TrimmedMean problem;
  std::int64_t width;
};

// Batcher's network that sorts m numbers by merging odd and even ones, in its order.
std::vector<Exchange> sorting_network(std::int64_t m) {
  std::vector<Exchange> found;
  for (std::int64_t p = 1; p < m; p *= 2) {
    for (std::int64_t k = p; k >= 1; k /= 2) {
      for (std::int64_t j = k % p; j + k < m; j += 2 * k) {
        for (std::int64_t i = j; i < std::min(j + k, m - k); ++i) {
          if (i / (2 * p) == (i + k) / (2 * p)) found.push_back({i, i + k});
        }
      }
    }
  }
  return found;
}

// The network without what only decides on the order within the least, the middle or the largest numbers: exchanges of
// two places of one of these groups that no later exchange touches.
std::vector<Exchange> trimming_network(std::int64_t m, std::int64_t trim) {
  const std::vector<Exchange> all = sorting_network(m);
  const auto group = [=](std::int64_t place) { return place < trim ? 0 : place < m - trim ? 1 : 2; };
  std::vector<bool> touched(static_cast<std::size_t>(m));
  std::vector<Exchange> kept;
  for (auto e = all.rbegin(); e != all.rend(); ++e) {
    const auto low = static_cast<std::size_t>(e->low), high = static_cast<std::size_t>(e->high);
    if (!touched[low] && !touched[high] && group(e->low) == group(e->high)) continue;
    touched[low] = touched[high] = true;
    kept.push_back(*e);
  }
  std::reverse(kept.begin(), kept.end());
  return kept;
}

void run(std::int64_t task, void* context) {
  static thread_local Scratch scratch;
  const Work& work = *static_cast<const Work*>(context);
  const Matrix& rows = work.problem.rows;
  const std::int64_t size = std::max<std::int64_t>(size_of(rows.dtype), 4);
  void* memory = scratch.reserve(rows.rows * work.width * size);
  const std::int64_t begin = task * kTrimTask, end = std::min(begin + kTrimTask, rows.columns);
  FL_DISPATCH(trimmed_means(work.problem, begin, end, work.width, memory));
}

}  // namespace

void trimmed_mean(Matrix rows, std::int64_t trim, void* out, ParallelFor parallel) {
  const std::vector<Exchange> network = trimming_network(rows.rows, trim);
  const std::int64_t size = std::max<std::int64_t>(size_of(rows.dtype), 4);
  const std::int64_t fitting = std::clamp<std::int64_t>(kTrimPanelBytes / (rows.rows * size), kTrimLanes, kTrimMost);
  // Odd: rows that begin a large power of two apart share few sets of the first-level cache.
  const std::int64_t widths = (fitting / kTrimLanes - 1) | 1;
  Work work{{rows, trim, network.data(), static_cast<std::int64_t>(network.size()), out}, widths * kTrimLanes};
  parallel((rows.columns + kTrimTask - 1) / kTrimTask, &run, &work);
}

}  // namespace fl_lightning::cpu
