// SPDX-License-Identifier: Apache-2.0
// The two 16-bit formats, one number at a time. Rounding is to nearest even, and from float64 it happens once.
#pragma once

#include <cstdint>
#include <cstring>

#include "../../ops.h"

namespace fl_lightning::cpu {

struct BFloat16 {
  std::uint16_t bits;
};
struct Half {
  std::uint16_t bits;
};

inline float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline double widened(double x) { return x; }
inline double widened(float x) { return x; }
inline double widened(BFloat16 x) { return float_of(static_cast<std::uint32_t>(x.bits) << 16); }
inline double widened(Half x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // The multiplication puts the exponent right, for subnormal numbers too.
  const float magnitude = float_of(rest << 13) * float_of(0x77800000u);  // 2^112
  return float_of(sign | bits_of(magnitude));
}

inline void narrow(double x, double* out) { *out = x; }
inline void narrow(double x, float* out) { *out = static_cast<float>(x); }
inline void narrow(double x, BFloat16* out) {
  const std::uint32_t bits = bits_of(static_cast<float>(with_14_bits(x)));
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out->bits = static_cast<std::uint16_t>(nan ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
inline void narrow(double x, Half* out) {
  const std::uint32_t bits = bits_of(static_cast<float>(with_14_bits(x)));
  const std::uint32_t sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  std::uint32_t result;
  if (rest > 0x7f800000u) {
    result = 0x7e00u;  // NaN
  } else if (rest >= 0x477ff000u) {
    result = 0x7c00u;  // rounds to infinity
  } else if (rest < 0x38800000u) {
    // Subnormal: adding 1/2 leaves the number, rounded to a multiple of 2^-24, in the low bits.
    result = bits_of(float_of(rest) + 0.5f) - 0x3f000000u;
  } else {
    result = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13;
  }
  out->bits = static_cast<std::uint16_t>(sign | result);
}

}  // namespace fl_lightning::cpu
