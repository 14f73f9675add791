// SPDX-License-Identifier: Apache-2.0
// Mistakes such as kernels can have, one at a time: each must end the process. They show that the watching works.
#include <cstdio>

#include "../../csrc/cpu/kernels/scratch.h"
#include "fuzz.h"

namespace fuzz {
namespace {

// A kernel as wrong as `kind` says: out[c] = numbers[c] + numbers[c + 1], and 0 for the last one.
void kernel(int kind, const int32_t* numbers, int64_t n, int32_t* out, bool second) {
  static thread_local fl_lightning::cpu::Scratch scratch;
  auto* sums = static_cast<int32_t*>(scratch.reserve(n * static_cast<int64_t>(sizeof(int32_t))));
  for (int64_t c = 0; c < n; ++c) sums[c] = kind == 4 && c == 1 ? sums[c] : 0;
  if (kind == 5) static_cast<void>(scratch.reserve(2 * n));
  for (int64_t c = 0; c < n; ++c) sums[c] += numbers[c] + (kind == 1 || c + 1 < n ? numbers[c + 1] : 0);
  if (kind == 2) sums[n] = 0;
  for (int64_t c = 0; c < n; ++c) out[c] = sums[c];
  if (kind == 3) out[-1] = 0;
  if (kind == 6) out[0] += INT32_MAX;
  if (kind == 7) out[n - 1] += second;  // as if it depended on the threads
}

}  // namespace

int64_t fault(int kind) {
  const int64_t n = 2 * between(2, 50);
  describe("fault", 1, n);
  Buffer numbers(n, 4), out(kind == 8 ? n + 1 : n, 4);  // 8: an output that is left as it was
  for (int64_t c = 0; c < n; ++c) numbers.as<int32_t>()[c] = static_cast<int32_t>(between(1, 3));
  bool second = false;
  same_bits_twice({&out}, [&](ParallelFor) {
    kernel(kind, numbers.as<int32_t>(), n, out.as<int32_t>(), second);
    second = true;
  });
  for (int64_t c = 0; c < n; ++c) {
    const double wanted = numbers.as<int32_t>()[c] + (c + 1 < n ? numbers.as<int32_t>()[c + 1] : 0);
    check("out", c, out.as<int32_t>()[c], wanted);
  }
  std::printf("fault %d: not found\n", kind);
  return 2;
}

}  // namespace fuzz
