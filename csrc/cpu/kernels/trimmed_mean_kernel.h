// SPDX-License-Identifier: Apache-2.0
// Means of what is left of columns without their extreme values. Included once per instruction set by every_isa.h.
//
// A panel of columns is copied as numbers to compare in, and then sorted kTrimLanes columns at a time: an exchange of
// the network puts the lesser numbers of two rows into the first, in all lanes at once. The middle rows are added up in
// float64, in their order. Exchanges only move numbers, so every instruction set finds the same bits.
namespace fl_lightning::cpu::FL_ISA {

FL_INLINE float compared(const float*) { return 0; }
FL_INLINE float compared(const Half*) { return 0; }
FL_INLINE float compared(const BFloat16*) { return 0; }
FL_INLINE double compared(const double*) { return 0; }

FL_INLINE void copy_vectors(const double* from, double* to, std::int64_t count) {
  for (std::int64_t c = 0; c < count; c += kDoubles) store(to + c, load(from + c));
}
template <class T>
FL_INLINE void copy_vectors(const T* from, float* to, std::int64_t count) {
  for (std::int64_t c = 0; c < count; c += kFloats) store(to + c, load(from + c));
}

// Both may be NaN, which no comparison tells from another number: then the two are swapped, and none is lost. Of a loop
// over lanes GCC makes stores that depend on each lane's comparison, which take twice as long or more.
template <class Real>
FL_INLINE void exchange(Real* low, Real* high) {
  constexpr int width = sizeof(Floats) / sizeof(Real);
  for (int lane = 0; lane < kTrimLanes; lane += width) {
    const auto a = load(low + lane), b = load(high + lane);
    store(low + lane, a < b ? a : b);
    store(high + lane, a < b ? b : a);
  }
}

template <class T>
void trim(const TrimmedMean& p, std::int64_t begin, std::int64_t end, std::int64_t width, void* memory) {
  using Real = decltype(compared(static_cast<const T*>(nullptr)));
  Real* const panel = static_cast<Real*>(memory);
  const std::int64_t m = p.rows.rows, left = m - 2 * p.trim;
  T* const out = static_cast<T*>(p.out);
  for (std::int64_t c0 = begin; c0 < end; c0 += width) {
    const std::int64_t columns = end - c0 < width ? end - c0 : width;
    const std::int64_t padded = (columns + kTrimLanes - 1) / kTrimLanes * kTrimLanes,
                       whole = columns / kTrimLanes * kTrimLanes;
    for (std::int64_t r = 0; r < m; ++r) {
      const T* x = static_cast<const T*>(p.rows.data) + r * p.rows.stride + c0;
      Real* to = panel + r * width;
      copy_vectors(x, to, whole);
      for (std::int64_t c = whole; c < columns; ++c) to[c] = static_cast<Real>(widened(x[c]));
      for (std::int64_t c = columns; c < padded; ++c) to[c] = 0;
    }
    for (std::int64_t c = 0; c < padded; c += kTrimLanes) {
      Real* const x = panel + c;
      for (std::int64_t e = 0; e < p.exchanges; ++e) {
        exchange(x + p.network[e].low * width, x + p.network[e].high * width);
      }
      double sums[kTrimLanes] = {};
      int undefined[kTrimLanes] = {};
      for (std::int64_t r = 0; r < m; ++r) {
        for (int lane = 0; lane < kTrimLanes; ++lane) undefined[lane] |= !(x[r * width + lane] == x[r * width + lane]);
      }
      for (std::int64_t r = p.trim; r < m - p.trim; ++r) {
        for (int lane = 0; lane < kTrimLanes; ++lane) sums[lane] += static_cast<double>(x[r * width + lane]);
      }
      for (int lane = 0; lane < kTrimLanes && c + lane < columns; ++lane) {
        const double mean = sums[lane] / static_cast<double>(left);
        narrow(undefined[lane] ? __builtin_nan("") : mean, out + c0 + c + lane);
      }
    }
  }
}

inline void trimmed_means(const TrimmedMean& p, std::int64_t begin, std::int64_t end, std::int64_t width,
                          void* memory) {
  FL_BY_DTYPE(p.rows.dtype, trim, (p, begin, end, width, memory));
}

}  // namespace fl_lightning::cpu::FL_ISA
