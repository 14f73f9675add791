// SPDX-License-Identifier: Apache-2.0
// Compiles a kernel once per instruction set, each time in a namespace of its own: avx512, avx2 and base on x86, base
// alone elsewhere. An op's source file defines FL_KERNEL as the name of the kernel's file, which lies beside this one,
// and includes this file, once. FL_DISPATCH then calls the version that suits the processor.
//
// Files that end in _kernel.h are compiled in this way; they have no include guard. They include nothing but each
// other: what else they use, this file or the op's source file includes before the first instruction set begins. And
// they use no templates of the standard library: the linker keeps one copy of each instantiation, and if that were the
// one with wide instructions, an older processor would run it.
#include <cstdint>

#include "../simd/dispatch.h"
#include "arguments.h"

#if FL_X86
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own header trips these (its bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define FL_INLINE inline __attribute__((always_inline))

#if FL_X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#define FL_ISA avx512
#include "../simd/avx512.h"
#include FL_KERNEL
#undef FL_ISA
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define FL_ISA avx2
#include "../simd/avx2.h"
#include FL_KERNEL
#undef FL_ISA
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#define FL_ISA base
#include "../simd/base.h"
#include FL_KERNEL
#undef FL_ISA
