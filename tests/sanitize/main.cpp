// SPDX-License-Identifier: Apache-2.0
// Calls the CPU kernels with random shapes, dtypes, offsets, strides, alignments, values and threads, and compares
// every result with a plain loop. `make sanitize` runs it with AddressSanitizer and UndefinedBehaviorSanitizer, which
// end the process at the first finding.
//
//   fuzz CALLS SEED       calls, in the instruction set that FL_LIGHTNING_ISA chooses
//   fuzz CALLS SEED CALL  goes on from this call: a failure prints its number
//   fuzz fault KIND       makes a mistake that must be found
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fuzz.h"

namespace {

struct Op {
  const char* name;
  std::int64_t (*run)();
  int share;  // of all random calls
  std::int64_t calls = 0;
  double seconds = 0;
};

Op ops[] = {
    {"layer_gram", fuzz::layer_gram, 3},
    {"layer_squares", fuzz::layer_squares, 1},
    {"layer_cross_gram", fuzz::layer_cross_gram, 3},
    {"layer_chosen_gram", fuzz::layer_chosen_gram, 3},
    {"layer_dots", fuzz::layer_dots, 2},
    {"layer_combine", fuzz::layer_combine, 3},
    {"layer_cross_combine", fuzz::layer_cross_combine, 2},
    {"puc_track", fuzz::puc_track, 3},
    {"puc_combine", fuzz::puc_combine, 3},
    {"trimmed_mean", fuzz::trimmed_mean, 2},
    {"project_conflicts", fuzz::project_conflicts, 2},
    {"min_norm", fuzz::min_norm, 2},
    {"common_descent", fuzz::common_descent, 2},
};

Op& any_op() {
  int total = 0;
  for (const Op& op : ops) total += op.share;
  std::int64_t ticket = fuzz::between(0, total - 1);
  for (Op& op : ops) {
    if (ticket < op.share) return op;
    ticket -= op.share;
  }
  std::abort();
}

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

}  // namespace

int main(int count, char** arguments) {
  if (count == 3 && std::strcmp(arguments[1], "fault") == 0) {
    fuzz::start(0, 0);
    fuzz::fault(std::atoi(arguments[2]));
    return 0;
  }
  const std::int64_t calls = count > 1 ? std::atoll(arguments[1]) : 1000;
  const auto seed = static_cast<std::uint64_t>(count > 2 ? std::atoll(arguments[2]) : 0);
  std::int64_t number = count > 3 ? std::atoll(arguments[3]) : 0, made = 0;
  const auto begin = Clock::now();
  for (; made < calls; ++number) {
    fuzz::start(seed, number);
    Op& op = any_op();
    const auto op_begin = Clock::now();
    const std::int64_t here = op.run();
    op.seconds += seconds_since(op_begin);
    op.calls += here;
    made += here;
  }
  std::printf("%s: %" PRId64 " calls, seed %" PRIu64 ", %.1f s, no finding\n", fl_lightning::cpu::instruction_set(),
              made, seed, seconds_since(begin));
  for (const Op& op : ops) std::printf("  %-18s %8" PRId64 " calls %7.1f s\n", op.name, op.calls, op.seconds);
}
