// SPDX-License-Identifier: Apache-2.0
// Inner products over one piece of a layer. Included once per instruction set by every_isa.h.
//
// Sums of float32 and 16-bit rows run in float32 lanes, kFlush products in a lane, and are then added in float64: see
// the bound at kFlush. Float64 rows, and rows so large or small that float32 products lose accuracy, run in float64.
namespace fl_lightning::cpu::FL_ISA {

// Products added in one lane before the lane goes to float64. A sum of k products in float32 is off by at most
// k * 2^-24 of the sum of their magnitudes, which is at most the product of the norms: 32 * 2^-24 = 1.9e-6 in the worst
// case (33 * 2^-24 without fused multiply-add), about 1e-8 where rounding errors have random signs.
inline constexpr int kFlush = 24;
// Every panel is a multiple of this many columns; zeros fill up the last one.
inline constexpr std::int64_t kUnit = 4 * kFloats;

// Pieces up to this long run in float64: too short for rounding errors to average out, and cheap.
inline constexpr std::int64_t kShort = 2048;

template <class T>
struct Lanes {  // of a 16-bit format: goes through float32
  static constexpr bool in_place = false;
};
template <>
struct Lanes<float> {
  using Vector = Floats;
  static constexpr int count = kFloats;
  static constexpr DType dtype = DType::f32;
  static constexpr bool in_place = true;
};
template <>
struct Lanes<double> {
  using Vector = Doubles;
  static constexpr int count = kDoubles;
  static constexpr DType dtype = DType::f64;
  static constexpr bool in_place = true;
};

FL_INLINE void flush(Floats x, double* sums) { store(sums, add(load(sums), folded(x))); }
FL_INLINE void flush(Doubles x, double* sums) { store(sums, add(load(sums), x)); }

// Adds the products of R rows with C rows to kDoubles float64 lanes for each pair. kTriangle: b is a, and only the
// pairs (r, c <= r) count. All operands of the inner loop are in registers, so each load serves R or C products.
template <class A, class T, int R, int C, bool kTriangle>
void tile(const A* a, std::int64_t a_stride, const T* b, std::int64_t b_stride, std::int64_t columns, double* sums) {
  using Vector = typename Lanes<T>::Vector;
  constexpr int lanes = Lanes<T>::count;
  constexpr int pairs = kTriangle ? R * (R + 1) / 2 : R * C;
  // Enough sums in flight to hide the latency of an addition.
  constexpr int streams = pairs >= 8 ? 1 : pairs >= 3 ? 2 : 4;
  constexpr std::int64_t chunk = static_cast<std::int64_t>(kFlush) * streams * lanes;
  for (std::int64_t start = 0; start < columns;) {
    const std::int64_t stop = Lanes<T>::dtype == DType::f64 || columns - start < chunk ? columns : start + chunk;
    Vector total[streams][pairs];
#pragma GCC unroll 32
    for (int i = 0; i < streams * pairs; ++i) set_zero(total[i / pairs][i % pairs]);
    for (; start < stop; start += streams * lanes) {
#pragma GCC unroll 4
      for (int s = 0; s < streams; ++s) {
        Vector right[C];
#pragma GCC unroll 5
        for (int c = 0; c < C; ++c) right[c] = load(b + c * b_stride + start + s * lanes);
        int pair = 0;
#pragma GCC unroll 5
        for (int r = 0; r < R; ++r) {
          Vector left;
          if constexpr (kTriangle) {
            left = right[r];
          } else {
            left = load(a + r * a_stride + start + s * lanes);
          }
#pragma GCC unroll 5
          for (int c = 0; c < (kTriangle ? r + 1 : C); ++c, ++pair) {
            total[s][pair] = multiply_add(left, right[c], total[s][pair]);
          }
        }
      }
    }
#pragma GCC unroll 32
    for (int i = 0; i < streams * pairs; ++i) flush(total[i / pairs][i % pairs], sums + i % pairs * kDoubles);
  }
}

template <class A, class T>
using Tile = void (*)(const A*, std::int64_t, const T*, std::int64_t, std::int64_t, double*);

// The tile of this size, at most kTile each way.
template <class A, class T, int R = 1, int C = 1>
Tile<A, T> find_tile(int rows, int others) {
  if constexpr (R < kTile) {
    if (rows > R) return find_tile<A, T, R + 1, C>(rows, others);
  }
  if constexpr (C < kTile) {
    if (others > C) return find_tile<A, T, R, C + 1>(rows, others);
  }
  return tile<A, T, R, C, false>;
}
template <class T, int R = 1>
Tile<T, T> find_triangle(int rows) {
  if constexpr (R < kTile) {
    if (rows > R) return find_triangle<T, R + 1>(rows);
  }
  return tile<T, T, R, R, true>;
}

// Cuts rows into groups of at most kTile, as equal as they can be.
struct Groups {
  explicit Groups(std::int64_t rows) : rows(rows), count((rows + kTile - 1) / kTile) {}
  std::int64_t start(std::int64_t group) const {
    const std::int64_t large = rows % count;
    return group * (rows / count) + (group < large ? group : large);
  }
  int size(std::int64_t group) const { return static_cast<int>(start(group + 1) - start(group)); }

  std::int64_t rows, count;
};

template <class T, class S>
void convert(const S* from, std::int64_t count, T* to) {
  std::int64_t i = 0;
  for (; i + Lanes<T>::count <= count; i += Lanes<T>::count) {
    if constexpr (Lanes<T>::dtype == DType::f64) {
      store(to + i, widen(from + i));
    } else {
      store(to + i, load(from + i));
    }
  }
  for (; i < count; ++i) to[i] = static_cast<T>(widened(from[i]));
}

template <class T>
struct Panel {
  const T* data;
  std::int64_t stride;
};

// Columns of a matrix in format T: where they lie if that will do, else a converted copy, filled up with zeros.
template <class T>
Panel<T> panel_of(const Matrix& rows, std::int64_t begin, std::int64_t width, Scratch& scratch) {
  if (rows.dtype == Lanes<T>::dtype && width % kUnit == 0) {
    return {static_cast<const T*>(rows.data) + begin, rows.stride};
  }
  const std::int64_t padded = (width + kUnit - 1) / kUnit * kUnit;
  // Not a power of two: rows would compete for the same lines of the cache.
  const std::int64_t stride = padded + kUnit;
  T* copy = static_cast<T*>(scratch.reserve(rows.rows * stride * static_cast<std::int64_t>(sizeof(T))));
  for (std::int64_t r = 0; r < rows.rows; ++r) {
    T* to = copy + r * stride;
    const std::int64_t first = r * rows.stride + begin;
    if (rows.dtype == DType::f32) {
      convert(static_cast<const float*>(rows.data) + first, width, to);
    } else if (rows.dtype == DType::bf16) {
      convert(static_cast<const BFloat16*>(rows.data) + first, width, to);
    } else if (rows.dtype == DType::f16) {
      convert(static_cast<const Half*>(rows.data) + first, width, to);
    } else if constexpr (Lanes<T>::dtype == DType::f64) {
      convert(static_cast<const double*>(rows.data) + first, width, to);
    }
    for (std::int64_t i = width; i < padded; ++i) to[i] = 0;
  }
  return {copy, stride};
}

// All pairs of one panel.
template <class A, class T>
void add_tiles(const Products& problem, Panel<A> a, Panel<T> b, std::int64_t columns, double* sums) {
  const Groups left(problem.rows.rows), right(problem.others.rows);
  for (std::int64_t i = 0; i < left.count; ++i) {
    const A* rows = a.data + left.start(i) * a.stride;
    const int r = left.size(i);
    for (std::int64_t j = 0; j < (problem.symmetric ? i : right.count); ++j) {
      const int c = right.size(j);
      find_tile<A, T>(r, c)(rows, a.stride, b.data + right.start(j) * b.stride, b.stride, columns, sums);
      sums += r * c * kDoubles;
    }
    if constexpr (Lanes<A>::in_place) {
      if (!problem.symmetric) continue;
      find_triangle<T>(r)(rows, a.stride, rows, a.stride, columns, sums);
      sums += r * (r + 1) / 2 * kDoubles;
    }
  }
}

// The sums of add_tiles, each reduced to one number.
inline void collect(const Products& problem, const double* sums, double* out) {
  const Groups left(problem.rows.rows), right(problem.others.rows);
  const std::int64_t others = problem.others.rows;
  for (std::int64_t i = 0; i < left.count; ++i) {
    for (std::int64_t j = 0; j < (problem.symmetric ? i + 1 : right.count); ++j) {
      for (std::int64_t r = left.start(i); r < left.start(i + 1); ++r) {
        const std::int64_t end = problem.symmetric && i == j ? r + 1 : right.start(j + 1);
        for (std::int64_t c = right.start(j); c < end; ++c, sums += kDoubles) {
          out[r * others + c] = sum(load(sums));
          if (problem.symmetric) out[c * others + r] = out[r * others + c];
        }
      }
    }
  }
}

template <class T>
void sum_products(const Products& problem, std::int64_t begin, std::int64_t end, double* out,
                  ProductsScratch& scratch) {
  const std::int64_t lanes = problem.pairs() * kDoubles;
  double* sums = static_cast<double*>(scratch.sums.reserve(lanes * static_cast<std::int64_t>(sizeof(double))));
  for (std::int64_t i = 0; i < lanes; ++i) sums[i] = 0;

  const std::int64_t most = panel_columns(problem);
  for (std::int64_t width; begin < end; begin += width) {
    width = end - begin < most ? end - begin : most;
    if (width > kUnit) width -= width % kUnit;  // the rest is the last panel
    const std::int64_t padded = (width + kUnit - 1) / kUnit * kUnit;
    if constexpr (Lanes<T>::dtype == DType::f32) {
      // Rows that are loaded once need no converted copy.
      if (!problem.symmetric && problem.others.rows <= kTile && width == padded) {
        const Panel<T> b = panel_of<T>(problem.others, begin, width, scratch.right);
        if (problem.rows.dtype == DType::bf16) {
          const auto* data = static_cast<const BFloat16*>(problem.rows.data);
          add_tiles<BFloat16, T>(problem, {data + begin, problem.rows.stride}, b, padded, sums);
          continue;
        }
        if (problem.rows.dtype == DType::f16) {
          const auto* data = static_cast<const Half*>(problem.rows.data);
          add_tiles<Half, T>(problem, {data + begin, problem.rows.stride}, b, padded, sums);
          continue;
        }
      }
    }
    const Panel<T> a = panel_of<T>(problem.rows, begin, width, scratch.left);
    const Panel<T> b = problem.symmetric ? a : panel_of<T>(problem.others, begin, width, scratch.right);
    add_tiles<T, T>(problem, a, b, padded, sums);
  }
  collect(problem, sums, out);
}

inline double square_norm(const Matrix& rows, std::int64_t row, std::int64_t begin, std::int64_t end,
                          ProductsScratch& scratch) {
  const std::int64_t size = rows.dtype == DType::f64 ? 8 : rows.dtype == DType::f32 ? 4 : 2;
  const Matrix one{static_cast<const char*>(rows.data) + row * rows.stride * size, 1, rows.columns, rows.stride,
                   rows.dtype};
  double square;
  sum_products<double>({one, one, true}, begin, end, &square, scratch);
  return square;
}

// Whether sums of float32 products are as good as promised. Overflow leaves an infinity or NaN. Products below the
// normal range lose up to 2^-150 each; that matters where the product of the norms is below columns * 2^-123.
inline bool within_range(const Products& problem, std::int64_t begin, std::int64_t end, const double* out,
                         ProductsScratch& scratch) {
  const double small = static_cast<double>(end - begin) * 0x1p-123;
  const std::int64_t others = problem.others.rows;
  for (std::int64_t i = 0; i < problem.rows.rows; ++i) {
    double square = -1;  // of row i, once it is needed
    for (std::int64_t j = 0; j < (problem.symmetric ? i + 1 : others); ++j) {
      const double size = __builtin_fabs(out[i * others + j]);
      if (!(size <= 1.7976931348623157e308)) return false;
      if (size >= small) continue;
      if (square < 0) square = square_norm(problem.rows, i, begin, end, scratch);
      if (square == 0) break;
      const double other = square_norm(problem.others, j, begin, end, scratch);
      if (other != 0 && square * other < small * small) return false;
    }
  }
  return true;
}

inline void products(const Products& problem, std::int64_t begin, std::int64_t end, double* out,
                     ProductsScratch& scratch) {
  if (problem.rows.dtype != DType::f64 && problem.others.dtype != DType::f64 && end - begin > kShort) {
    sum_products<float>(problem, begin, end, out, scratch);
    if (within_range(problem, begin, end, out, scratch)) return;
  }
  sum_products<double>(problem, begin, end, out, scratch);
}

}  // namespace fl_lightning::cpu::FL_ISA
