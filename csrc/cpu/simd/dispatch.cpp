// SPDX-License-Identifier: Apache-2.0
#include "dispatch.h"

#include <cstdlib>
#include <cstring>

#include "../../ops.h"

namespace fl_lightning::cpu {
namespace {

Isa detect() {
#if FL_X86
  const char* asked = std::getenv("FL_LIGHTNING_ISA");
  const bool base = asked && std::strcmp(asked, "base") == 0;
  const bool avx2 = asked && std::strcmp(asked, "avx2") == 0;
  __builtin_cpu_init();
  // GCC's test covers the operating system's support for the wide registers too.
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx2 && has_avx512 && !base && !avx2) return Isa::avx512;
  if (has_avx2 && !base) return Isa::avx2;
#endif
  return Isa::base;
}

}  // namespace

Isa isa() {
  static const Isa best = detect();
  return best;
}

const char* instruction_set() {
  switch (isa()) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    default:
#if FL_X86
      return "sse2";
#elif defined(__aarch64__)
      return "neon";
#else
      return "generic";
#endif
  }
}

}  // namespace fl_lightning::cpu
