// SPDX-License-Identifier: Apache-2.0
// Vectors of 128 bits in the compiler's own notation: SSE2 on x86, NEON on Arm, scalars elsewhere. See avx512.h.
namespace fl_lightning::cpu::base {

typedef float Floats __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(16)));
typedef std::int64_t Mask __attribute__((vector_size(16)));
inline constexpr int kFloats = 4, kDoubles = 2;
#if defined(__aarch64__)
inline constexpr ProductTile kTiles = kTiles32;
#else
inline constexpr ProductTile kTiles = kTilesPlain;
#endif
inline constexpr int kTile = kTiles.square, kTall = kTiles.tall;

template <class Vector, class T>
FL_INLINE Vector load_as(const T* p) {
  Vector x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

FL_INLINE Floats load(const float* p) { return load_as<Floats>(p); }
FL_INLINE Doubles load(const double* p) { return load_as<Doubles>(p); }
FL_INLINE void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }
FL_INLINE void store(double* p, Doubles x) { std::memcpy(p, &x, sizeof x); }
FL_INLINE void set_zero(Floats& x) { x = Floats{}; }
FL_INLINE void set_zero(Doubles& x) { x = Doubles{}; }
FL_INLINE void keep_in_register(Floats&) {}
FL_INLINE void keep_in_register(Doubles&) {}
FL_INLINE Doubles broadcast(double x) { return Doubles{x, x}; }
FL_INLINE Doubles add(Doubles a, Doubles b) { return a + b; }
#if defined(__aarch64__)
FL_INLINE double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }
FL_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
FL_INLINE Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return vfmaq_f64(c, a, b); }
#else
FL_INLINE double multiply_add(double a, double b, double c) { return a * b + c; }
FL_INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
FL_INLINE Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return a * b + c; }
#endif

FL_INLINE void add_sums(Floats a, Floats b, Floats c, Floats d, double* to) {
  to[0] += static_cast<double>((a[0] + a[1]) + (a[2] + a[3]));
  to[1] += static_cast<double>((b[0] + b[1]) + (b[2] + b[3]));
  to[2] += static_cast<double>((c[0] + c[1]) + (c[2] + c[3]));
  to[3] += static_cast<double>((d[0] + d[1]) + (d[2] + d[3]));
}
FL_INLINE double sum(Doubles x) { return x[0] + x[1]; }

template <class T>
FL_INLINE Floats load(const T* p) {
  return Floats{static_cast<float>(widened(p[0])), static_cast<float>(widened(p[1])), static_cast<float>(widened(p[2])),
                static_cast<float>(widened(p[3]))};
}

template <class T>
FL_INLINE Doubles widen(const T* p) {
  return Doubles{widened(p[0]), widened(p[1])};
}

template <class T>
FL_INLINE void write(T* p, Doubles x, bool) {
  narrow(x[0], p);
  narrow(x[1], p + 1);
}

FL_INLINE void fence() {}

FL_INLINE Mask mask(std::uint32_t bits) {
  return Mask{-static_cast<std::int64_t>(bits & 1u), -static_cast<std::int64_t>(bits >> 1 & 1u)};
}
FL_INLINE Doubles masked(Mask chosen, Doubles a, Doubles b) {
  return (Doubles)((chosen & (Mask)a) | (~chosen & (Mask)b));
}
FL_INLINE Doubles masked_add(Mask chosen, Doubles a, Doubles b) { return masked(chosen, a + b, a); }
FL_INLINE Doubles masked_multiply_add(Mask chosen, Doubles a, Doubles b, Doubles c) {
  return masked(chosen, multiply_add(a, b, c), c);
}
FL_INLINE Doubles quotient(Doubles a, Doubles b) { return masked((Mask)(b != Doubles{}), a / b, Doubles{}); }

FL_INLINE std::uint32_t not_positive(Floats x) {
  std::uint32_t bits = 0;
  for (int i = 0; i < kFloats; ++i) bits |= static_cast<std::uint32_t>(x[i] <= 0) << i;
  return bits;
}
FL_INLINE std::uint32_t not_positive(Doubles x) {
  return static_cast<std::uint32_t>(x[0] <= 0) | static_cast<std::uint32_t>(x[1] <= 0) << 1;
}

struct Compared {
  std::uint32_t at_least, at_most;
};
template <class Count>
FL_INLINE Compared compare(const Count* counts, Count low, Count high) {
  Compared bits{0, 0};
  for (int i = 0; i < 32; ++i) {
    bits.at_least |= static_cast<std::uint32_t>(counts[i] >= low) << i;
    bits.at_most |= static_cast<std::uint32_t>(counts[i] <= high) << i;
  }
  return bits;
}
template <class Count>
FL_INLINE void increment(Count* counts, std::uint32_t bits) {
  for (int i = 0; i < 32; ++i) counts[i] = static_cast<Count>(counts[i] + (bits >> i & 1u));
}

}  // namespace fl_lightning::cpu::base
