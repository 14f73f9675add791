// SPDX-License-Identifier: Apache-2.0
// Tensor cores on the processor. Which lane holds which element: PTX ISA, "Matrix Fragments for mma.m16n8k8" (.tf32)
// and "for mma.m16n8k16 with floating point type" (.f16, .bf16).
//
// PTX promises sums of at least single precision and leaves the rest open. Here they are what measurements found on the
// A100, the least accurate of the devices that have these instructions: the products of 4 (of 16 bits: 8) columns and
// the number they are added to are aligned by the largest exponent, that of a product being the sum of its factors';
// what lies below 24 bits after the leading one is cut off, and the sum is cut off to 24 bits. The H100 takes twice as
// many columns and one more bit. (F. Khattak and M. Mikaitis, Accurate Models of NVIDIA Tensor Cores, arXiv:2512.07004,
// 2025; M. Fasi et al., Numerical behavior of NVIDIA tensor cores, PeerJ Computer Science 7:e330, 2021.)
#include <cmath>
#include <cstring>

#include "include/cuda_bf16.h"
#include "include/cuda_fp16.h"

namespace simt {
namespace {

struct Fragments {
  unsigned a[4], b[2];
};
// Of two exchanges in a row: a lane may be at the next one while others still read those of the last.
Fragments fragments[2][kMaxThreads];

// The registers of all lanes of one warp as matrices A [16, depth] and B [depth, 8].
struct Operands {
  const Fragments* lanes;
  Kind kind;

  double a(int row, int k) const {
    const int group = row % 8, high = row / 8;
    if (kind == Kind::tf32) return number_of(kind, lanes[group * 4 + k % 4].a[high + k / 4 * 2], 0);
    return number_of(kind, lanes[group * 4 + k % 8 / 2].a[high + k / 8 * 2], k % 2);
  }
  double b(int k, int column) const {
    if (kind == Kind::tf32) return number_of(kind, lanes[column * 4 + k % 4].b[k / 4], 0);
    return number_of(kind, lanes[column * 4 + k % 8 / 2].b[k / 8], k % 2);
  }
};

// Of the leading bit; -1023 of zero. Numbers of float32 and their products are normal ones in float64.
int exponent_of(double x) { return static_cast<int>(bits_of(x) >> 52 & 0x7ff) - 1023; }

// Towards zero, to multiples of a power of two.
double cut_off(double x, int exponent) {
  const int spare = 52 - (exponent_of(x) - exponent);  // bits of the fraction that are cut off
  if (spare <= 0) return x;
  if (spare > 52) return 0.0;
  const std::uint64_t bits = bits_of(x) >> spare << spare;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace

Kind kind_of(const char* types) {
  return std::strstr(types, "tf32") ? Kind::tf32 : std::strstr(types, "bf16") ? Kind::bf16 : Kind::f16;
}

double number_of(Kind kind, unsigned word, int half) {
  const auto bits = static_cast<unsigned short>(word >> 16 * half);
  if (kind == Kind::f16) return __half2float(__ushort_as_half(bits));
  if (kind == Kind::bf16) return __bfloat162float({bits});
  return __uint_as_float(word & 0xffffe000u);
}

float sum_cut_off(const double (*factors)[2], int count, float start, int bits) {
  double plain = start, sum = 0.0;
  int largest = exponent_of(start);
  for (int i = 0; i < count; ++i) {
    const auto [x, y] = factors[i];
    plain += x * y;
    if (x * y != 0.0) largest = std::max(largest, exponent_of(x) + exponent_of(y));
  }
  if (!std::isfinite(plain)) return static_cast<float>(plain);
  sum = cut_off(start, largest - bits);
  for (int i = 0; i < count; ++i) sum += cut_off(factors[i][0] * factors[i][1], largest - bits);
  return static_cast<float>(cut_off(sum, exponent_of(sum) - 23));
}

void mma(const char* shape, const char* types, float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
         const float (&c)[4], const char* file, int line) {
  const Kind kind = kind_of(types);
  const int depth = kind == Kind::tf32 ? 8 : 16, together = depth / 2;
  if (std::string(shape) != (kind == Kind::tf32 ? "m16n8k8" : "m16n8k16")) fail(std::string("no mma ") + shape);
  const int thread = now().thread, lane = thread % kWarp;
  Fragments* const all = fragments[now().warp % 2];
  for (int r = 0; r < 4; ++r) all[thread].a[r] = a[r];
  for (int r = 0; r < 2; ++r) all[thread].b[r] = b[r];
  exchange(0xffffffffu, 0, file, line);
  const Operands operands{all + (thread - lane), kind};
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    d[e] = c[e];
    for (int k = 0; k < depth; k += together) {
      double factors[8][2];
      for (int i = 0; i < together; ++i) {
        factors[i][0] = operands.a(row, k + i);
        factors[i][1] = operands.b(k + i, column);
      }
      d[e] = sum_cut_off(factors, together, d[e], 24);
    }
  }
}

}  // namespace simt
