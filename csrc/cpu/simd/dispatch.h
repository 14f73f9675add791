// SPDX-License-Identifier: Apache-2.0
// Instruction sets. Every kernel is compiled once for each by every_isa.h; which one runs is decided at run time.
#pragma once

namespace fl_lightning::cpu {

enum class Isa { base, avx2, avx512 };

// The best instruction set of this processor. The environment variable FL_LIGHTNING_ISA (avx512, avx2 or base), read
// once, picks a lesser one: tests use it to reach every version on one machine.
Isa isa();

}  // namespace fl_lightning::cpu

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define FL_X86 1
// Calls the version of a function that suits the processor: FL_DISPATCH(name(arguments)).
#define FL_DISPATCH(call)                  \
  switch (::fl_lightning::cpu::isa()) {    \
    case ::fl_lightning::cpu::Isa::avx512: \
      avx512::call;                        \
      break;                               \
    case ::fl_lightning::cpu::Isa::avx2:   \
      avx2::call;                          \
      break;                               \
    default:                               \
      base::call;                          \
  }
#else
#define FL_X86 0
#define FL_DISPATCH(call) base::call
#endif
