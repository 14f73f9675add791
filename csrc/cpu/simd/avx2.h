// SPDX-License-Identifier: Apache-2.0
// Vectors of 256 bits, with fused multiply-add. See avx512.h.
namespace fl_lightning::cpu::avx2 {

using Floats = __m256;
using Doubles = __m256d;
using Mask = __m256d;
inline constexpr int kFloats = 8, kDoubles = 4;
inline constexpr int kTile = kTilesAvx2.square, kTall = kTilesAvx2.tall;

FL_INLINE Floats load(const float* p) { return _mm256_loadu_ps(p); }
FL_INLINE Doubles load(const double* p) { return _mm256_loadu_pd(p); }
FL_INLINE void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
FL_INLINE void store(double* p, Doubles x) { _mm256_storeu_pd(p, x); }
FL_INLINE void set_zero(Floats& x) { x = _mm256_setzero_ps(); }
FL_INLINE void set_zero(Doubles& x) { x = _mm256_setzero_pd(); }
FL_INLINE void keep_in_register(Floats& x) { __asm__("" : "+x"(x)); }
FL_INLINE void keep_in_register(Doubles& x) { __asm__("" : "+x"(x)); }
FL_INLINE Doubles broadcast(double x) { return _mm256_set1_pd(x); }
FL_INLINE Doubles add(Doubles a, Doubles b) { return _mm256_add_pd(a, b); }
FL_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
FL_INLINE Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
FL_INLINE double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }

FL_INLINE void add_sums(Floats a, Floats b, Floats c, Floats d, double* to) {
  const __m256 parts = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(parts), _mm256_extractf128_ps(parts, 1));
  _mm256_storeu_pd(to, _mm256_add_pd(_mm256_loadu_pd(to), _mm256_cvtps_pd(sums)));
}
FL_INLINE double sum(Doubles x) {
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
  return _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
}

FL_INLINE Floats load(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
FL_INLINE Floats load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

FL_INLINE Doubles widen(const double* p) { return _mm256_loadu_pd(p); }
FL_INLINE Doubles widen(const float* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
FL_INLINE Doubles widen(const BFloat16* p) {
  const __m128i bits = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(bits, 16)));
}
FL_INLINE Doubles widen(const Half* p) {
  return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

FL_INLINE void write(double* p, Doubles x, bool stream) { stream ? _mm256_stream_pd(p, x) : _mm256_storeu_pd(p, x); }
FL_INLINE void write(float* p, Doubles x, bool stream) {
  const __m128 y = _mm256_cvtpd_ps(x);
  stream ? _mm_stream_ps(p, y) : _mm_storeu_ps(p, y);
}
FL_INLINE void write_bits(void* p, __m128i bits, bool stream) {
  if (stream) {
    _mm_stream_si64(static_cast<long long*>(p), _mm_cvtsi128_si64(bits));
  } else {
    _mm_storel_epi64(static_cast<__m128i*>(p), bits);
  }
}
// See ops.h.
FL_INLINE Doubles with_14_bits(Doubles x) {
  const __m256i bits = _mm256_castpd_si256(x), rest = _mm256_set1_epi64x(kRest);
  const __m256i any = _mm256_add_epi64(_mm256_and_si256(bits, rest), rest);
  return _mm256_castsi256_pd(_mm256_andnot_si256(rest, _mm256_or_si256(bits, any)));
}
FL_INLINE void write(BFloat16* p, Doubles x, bool stream) {
  const __m128 y = _mm256_cvtpd_ps(with_14_bits(x));
  const __m128i bits = _mm_castps_si128(y);
  const __m128i even = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
  const __m128i rounded = _mm_srli_epi32(_mm_add_epi32(bits, _mm_add_epi32(even, _mm_set1_epi32(0x7fff))), 16);
  const __m128i nan = _mm_castps_si128(_mm_cmpunord_ps(y, y));
  const __m128i chosen = _mm_blendv_epi8(rounded, _mm_set1_epi32(0x7fc0), nan);
  write_bits(p, _mm_packus_epi32(chosen, chosen), stream);
}
FL_INLINE void write(Half* p, Doubles x, bool stream) {
  write_bits(p, _mm_cvtps_ph(_mm256_cvtpd_ps(with_14_bits(x)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), stream);
}

FL_INLINE void fence() { _mm_sfence(); }

FL_INLINE Mask mask(std::uint32_t bits) {
  const __m256i lanes = _mm256_setr_epi64x(1, 2, 4, 8);
  const __m256i all = _mm256_set1_epi64x(bits);
  return _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_and_si256(all, lanes), lanes));
}
FL_INLINE Doubles masked_add(Mask chosen, Doubles a, Doubles b) { return _mm256_add_pd(a, _mm256_and_pd(chosen, b)); }
FL_INLINE Doubles masked_multiply_add(Mask chosen, Doubles a, Doubles b, Doubles c) {
  return _mm256_blendv_pd(c, _mm256_fmadd_pd(a, b, c), chosen);
}
FL_INLINE Doubles quotient(Doubles a, Doubles b) {
  return _mm256_and_pd(_mm256_cmp_pd(b, _mm256_setzero_pd(), _CMP_NEQ_UQ), _mm256_div_pd(a, b));
}

FL_INLINE std::uint32_t bits_of(__m256 lanes) { return static_cast<std::uint32_t>(_mm256_movemask_ps(lanes)); }
FL_INLINE std::uint32_t bits_of(__m256i bytes) { return static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes)); }
FL_INLINE std::uint32_t not_positive(Floats x) { return bits_of(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LE_OQ)); }
FL_INLINE std::uint32_t not_positive(Doubles x) {
  return static_cast<std::uint32_t>(_mm256_movemask_pd(_mm256_cmp_pd(x, _mm256_setzero_pd(), _CMP_LE_OQ)));
}

struct Compared {
  std::uint32_t at_least, at_most;
};
FL_INLINE __m256i load_counts(const void* counts, int vector) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(counts) + vector);
}
FL_INLINE Compared compare(const std::uint8_t* counts, std::uint8_t low, std::uint8_t high) {
  const __m256i x = load_counts(counts, 0);
  return {bits_of(_mm256_cmpeq_epi8(x, _mm256_max_epu8(x, _mm256_set1_epi8(static_cast<char>(low))))),
          bits_of(_mm256_cmpeq_epi8(x, _mm256_min_epu8(x, _mm256_set1_epi8(static_cast<char>(high)))))};
}
// One byte for each of the 16-bit lanes of two vectors, in order.
FL_INLINE __m256i packed(__m256i a, __m256i b) { return _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xd8); }
FL_INLINE Compared compare(const std::int16_t* counts, std::int16_t low, std::int16_t high) {
  const __m256i x = load_counts(counts, 0), y = load_counts(counts, 1);
  const __m256i lows = _mm256_set1_epi16(low), highs = _mm256_set1_epi16(high);
  return {~bits_of(packed(_mm256_cmpgt_epi16(lows, x), _mm256_cmpgt_epi16(lows, y))),
          ~bits_of(packed(_mm256_cmpgt_epi16(x, highs), _mm256_cmpgt_epi16(y, highs)))};
}
FL_INLINE Compared compare(const std::int32_t* counts, std::int32_t low, std::int32_t high) {
  Compared bits{0, 0};
  for (int i = 0; i < 4; ++i) {
    const __m256i x = load_counts(counts, i);
    bits.at_least |= bits_of(_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), x))) << (8 * i);
    bits.at_most |= bits_of(_mm256_castsi256_ps(_mm256_cmpgt_epi32(x, _mm256_set1_epi32(high)))) << (8 * i);
  }
  return {~bits.at_least, ~bits.at_most};
}
// A chosen lane is all ones, -1: subtracting it adds 1.
FL_INLINE void increment(std::uint8_t* counts, std::uint32_t bits) {
  const __m256i source =
      _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i lanes = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), source);
  const __m256i chosen = _mm256_cmpeq_epi8(_mm256_and_si256(spread, lanes), lanes);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(counts), _mm256_sub_epi8(load_counts(counts, 0), chosen));
}
FL_INLINE void increment(std::int16_t* counts, std::uint32_t bits) {
  const __m256i lanes = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
  for (int i = 0; i < 2; ++i) {
    const __m256i all = _mm256_set1_epi16(static_cast<short>(bits >> (16 * i)));
    const __m256i chosen = _mm256_cmpeq_epi16(_mm256_and_si256(all, lanes), lanes);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(counts) + i, _mm256_sub_epi16(load_counts(counts, i), chosen));
  }
}
FL_INLINE void increment(std::int32_t* counts, std::uint32_t bits) {
  const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  for (int i = 0; i < 4; ++i) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(bits >> (8 * i)));
    const __m256i chosen = _mm256_cmpeq_epi32(_mm256_and_si256(all, lanes), lanes);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(counts) + i, _mm256_sub_epi32(load_counts(counts, i), chosen));
  }
}

}  // namespace fl_lightning::cpu::avx2
