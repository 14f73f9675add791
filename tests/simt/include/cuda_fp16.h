// SPDX-License-Identifier: Apache-2.0
// Stands in for CUDA's header of this name: float16 by its bits.
#pragma once

#include "cuda_runtime.h"

struct __half {
  std::uint16_t bits = 0;
};

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

inline float __half2float(__half x) {
  const int sign = x.bits >> 15, exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  float size = std::ldexp(static_cast<float>(exponent ? fraction + 1024 : fraction), (exponent ? exponent : 1) - 25);
  if (exponent == 31) size = fraction ? NAN : INFINITY;
  return sign ? -size : size;
}

inline __half __double2half(double x) {
  const double size = std::fabs(round_to(x, 10, -14));
  unsigned bits = 0x7e00;  // NaN
  if (size >= 65536) {
    bits = 0x7c00;
  } else if (size >= std::ldexp(1.0, -14)) {
    const int exponent = std::ilogb(size);
    bits = static_cast<unsigned>(exponent + 14) * 1024 + static_cast<unsigned>(std::ldexp(size, 10 - exponent));
  } else if (size < 1) {
    bits = static_cast<unsigned>(std::ldexp(size, 24));
  }
  return {static_cast<std::uint16_t>(bits | (std::signbit(x) ? 0x8000u : 0u))};
}

struct alignas(4) __half2 {
  __half x, y;
};
inline __half2 __hmin2(__half2 a, __half2 b) { return by_two(a, b, __half2float, fminf); }
inline __half2 __hmax2(__half2 a, __half2 b) { return by_two(a, b, __half2float, fmaxf); }
inline __half2 __hmax2_nan(__half2 a, __half2 b) { return by_two(a, b, __half2float, larger_or_nan); }
