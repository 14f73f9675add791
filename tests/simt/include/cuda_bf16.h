// SPDX-License-Identifier: Apache-2.0
// Stands in for CUDA's header of this name: bfloat16 is the upper half of a float32.
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  std::uint16_t bits = 0;
};

inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

inline __nv_bfloat16 __double2bfloat16(double x) {
  const float rounded = static_cast<float>(round_to(x, 7, -126));
  std::uint32_t bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  return {static_cast<std::uint16_t>(std::isnan(x) ? 0x7fc0 : bits >> 16)};
}

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __hmin2(__nv_bfloat162 a, __nv_bfloat162 b) { return by_two(a, b, __bfloat162float, fminf); }
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) { return by_two(a, b, __bfloat162float, fmaxf); }
inline __nv_bfloat162 __hmax2_nan(__nv_bfloat162 a, __nv_bfloat162 b) {
  return by_two(a, b, __bfloat162float, larger_or_nan);
}
