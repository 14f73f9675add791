// SPDX-License-Identifier: Apache-2.0
// An instruction set: vectors of 512 bits, and what kernels do with them. every_isa.h compiles the kernels with these
// names; avx2.h and base.h offer the same ones.
namespace fl_lightning::cpu::avx512 {

using Floats = __m512;
using Doubles = __m512d;
using Mask = __mmask8;
inline constexpr int kFloats = 16, kDoubles = 8;
inline constexpr int kTile = kTiles32.square, kTall = kTiles32.tall;

FL_INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
FL_INLINE Doubles load(const double* p) { return _mm512_loadu_pd(p); }
FL_INLINE void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
FL_INLINE void store(double* p, Doubles x) { _mm512_storeu_pd(p, x); }
FL_INLINE void set_zero(Floats& x) { x = _mm512_setzero_ps(); }
FL_INLINE void set_zero(Doubles& x) { x = _mm512_setzero_pd(); }
FL_INLINE void keep_in_register(Floats& x) { __asm__("" : "+v"(x)); }
FL_INLINE void keep_in_register(Doubles& x) { __asm__("" : "+v"(x)); }
FL_INLINE Doubles broadcast(double x) { return _mm512_set1_pd(x); }
FL_INLINE Doubles add(Doubles a, Doubles b) { return _mm512_add_pd(a, b); }
FL_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
FL_INLINE Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
FL_INLINE double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }

// Adds the sum of the lanes of each of four vectors to one of four float64 numbers.
FL_INLINE void add_sums(Floats a, Floats b, Floats c, Floats d, double* to) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  // Every 128 bits hold a part of a, b, c and d.
  const __m512 parts = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(parts), _mm512_extractf32x8_ps(parts, 1));
  const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
  _mm256_storeu_pd(to, _mm256_add_pd(_mm256_loadu_pd(to), _mm256_cvtps_pd(sums)));
}
FL_INLINE double sum(Doubles x) {
  const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(x), _mm512_extractf64x4_pd(x, 1));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
}

// kFloats numbers of a 16-bit format.
FL_INLINE Floats load(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
FL_INLINE Floats load(const Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// kDoubles numbers of any format.
FL_INLINE Doubles widen(const double* p) { return _mm512_loadu_pd(p); }
FL_INLINE Doubles widen(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
FL_INLINE Doubles widen(const BFloat16* p) {
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)));
}
FL_INLINE Doubles widen(const Half* p) {
  return _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// The inverse of widen, rounded. With stream, past the caches; then p is a multiple of the bytes written.
FL_INLINE void write(double* p, Doubles x, bool stream) { stream ? _mm512_stream_pd(p, x) : _mm512_storeu_pd(p, x); }
FL_INLINE void write(float* p, Doubles x, bool stream) {
  const __m256 y = _mm512_cvtpd_ps(x);
  stream ? _mm256_stream_ps(p, y) : _mm256_storeu_ps(p, y);
}
FL_INLINE void write_bits(void* p, __m128i bits, bool stream) {
  stream ? _mm_stream_si128(static_cast<__m128i*>(p), bits) : _mm_storeu_si128(static_cast<__m128i*>(p), bits);
}
// See ops.h.
FL_INLINE Doubles with_14_bits(Doubles x) {
  const __m512i bits = _mm512_castpd_si512(x), rest = _mm512_set1_epi64(kRest);
  const __m512i any = _mm512_add_epi64(_mm512_and_si512(bits, rest), rest);
  return _mm512_castsi512_pd(_mm512_andnot_si512(rest, _mm512_or_si512(bits, any)));
}
FL_INLINE void write(BFloat16* p, Doubles x, bool stream) {
  const __m256 y = _mm512_cvtpd_ps(with_14_bits(x));
  const __m256i bits = _mm256_castps_si256(y);
  const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff))), 16);
  const __mmask8 nan = _mm256_cmp_ps_mask(y, y, _CMP_UNORD_Q);
  write_bits(p, _mm256_cvtepi32_epi16(_mm256_mask_set1_epi32(rounded, nan, 0x7fc0)), stream);
}
FL_INLINE void write(Half* p, Doubles x, bool stream) {
  write_bits(p, _mm256_cvtps_ph(_mm512_cvtpd_ps(with_14_bits(x)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
             stream);
}

// Orders streamed writes before what follows.
FL_INLINE void fence() { _mm_sfence(); }

// Lane i is chosen by bit i.
FL_INLINE Mask mask(std::uint32_t bits) { return static_cast<Mask>(bits); }
FL_INLINE Doubles masked_add(Mask chosen, Doubles a, Doubles b) { return _mm512_mask_add_pd(a, chosen, a, b); }
FL_INLINE Doubles masked_multiply_add(Mask chosen, Doubles a, Doubles b, Doubles c) {
  return _mm512_mask3_fmadd_pd(a, b, c, chosen);
}
// a / b, or 0 where b is 0.
FL_INLINE Doubles quotient(Doubles a, Doubles b) {
  return _mm512_maskz_div_pd(_mm512_cmp_pd_mask(b, _mm512_setzero_pd(), _CMP_NEQ_UQ), a, b);
}

// Bit i is set where lane i is at most 0; NaN is not.
FL_INLINE std::uint32_t not_positive(Floats x) { return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LE_OQ); }
FL_INLINE std::uint32_t not_positive(Doubles x) { return _mm512_cmp_pd_mask(x, _mm512_setzero_pd(), _CMP_LE_OQ); }

// Of 32 counts: which are at least, which at most a number.
struct Compared {
  std::uint32_t at_least, at_most;
};
FL_INLINE Compared compare(const std::uint8_t* counts, std::uint8_t low, std::uint8_t high) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(counts));
  return {_mm256_cmpge_epu8_mask(x, _mm256_set1_epi8(static_cast<char>(low))),
          _mm256_cmple_epu8_mask(x, _mm256_set1_epi8(static_cast<char>(high)))};
}
FL_INLINE Compared compare(const std::int16_t* counts, std::int16_t low, std::int16_t high) {
  const __m512i x = _mm512_loadu_si512(counts);
  return {_mm512_cmpge_epi16_mask(x, _mm512_set1_epi16(low)), _mm512_cmple_epi16_mask(x, _mm512_set1_epi16(high))};
}
FL_INLINE Compared compare(const std::int32_t* counts, std::int32_t low, std::int32_t high) {
  Compared bits{0, 0};
  for (int i = 0; i < 2; ++i) {
    const __m512i x = _mm512_loadu_si512(counts + 16 * i);
    bits.at_least |= static_cast<std::uint32_t>(_mm512_cmpge_epi32_mask(x, _mm512_set1_epi32(low))) << (16 * i);
    bits.at_most |= static_cast<std::uint32_t>(_mm512_cmple_epi32_mask(x, _mm512_set1_epi32(high))) << (16 * i);
  }
  return bits;
}
// Adds 1 to those of 32 counts whose bit is set.
FL_INLINE void increment(std::uint8_t* counts, std::uint32_t bits) {
  __m256i* at = reinterpret_cast<__m256i*>(counts);
  const __m256i x = _mm256_loadu_si256(at);
  _mm256_storeu_si256(at, _mm256_mask_add_epi8(x, bits, x, _mm256_set1_epi8(1)));
}
FL_INLINE void increment(std::int16_t* counts, std::uint32_t bits) {
  const __m512i x = _mm512_loadu_si512(counts);
  _mm512_storeu_si512(counts, _mm512_mask_add_epi16(x, bits, x, _mm512_set1_epi16(1)));
}
FL_INLINE void increment(std::int32_t* counts, std::uint32_t bits) {
  for (int i = 0; i < 2; ++i) {
    const __m512i x = _mm512_loadu_si512(counts + 16 * i);
    const __mmask16 chosen = static_cast<__mmask16>(bits >> (16 * i));
    _mm512_storeu_si512(counts + 16 * i, _mm512_mask_add_epi32(x, chosen, x, _mm512_set1_epi32(1)));
  }
}

}  // namespace fl_lightning::cpu::avx512
