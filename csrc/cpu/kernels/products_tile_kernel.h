// SPDX-License-Identifier: Apache-2.0
// A tile: the products of a few rows with a few rows, all their sums in registers. Part of products_kernel.h.
namespace fl_lightning::cpu::FL_ISA {

// A lane adds up kFlush products before the lanes go to float64. A sum that passes through k float32 additions is off
// by at most k * 2^-24 of the sum of the magnitudes, which is at most the product of the norms. Here k is kFlush and
// the depth of the tree over the lanes, 28: 1.7e-6 in the worst case (29 without fused multiply-add); 4e-7 where all
// terms are equal, about 1e-8 where rounding errors have random signs.

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

// Places for the sums of a tile, one for each pair; pairs are added in groups of four.
inline constexpr int kPlaces = (kTile * kTile + 3) / 4 * 4;

template <int kPairs>
FL_INLINE void flush(const Floats (&total)[kPairs], double* sums) {
  Floats none;
  set_zero(none);
#pragma GCC unroll 8
  for (int i = 0; i < kPairs; i += 4) {
    add_sums(total[i], i + 1 < kPairs ? total[i + 1] : none, i + 2 < kPairs ? total[i + 2] : none,
             i + 3 < kPairs ? total[i + 3] : none, sums + i);
  }
}
template <int kPairs>
FL_INLINE void flush(const Doubles (&total)[kPairs], double* sums) {
#pragma GCC unroll 25
  for (int i = 0; i < kPairs; ++i) sums[i] += sum(total[i]);
}

// What a tile asks for while it works: rows that it is the first to read, some way ahead; or some rows of the next
// panel, whose addresses may lie beyond the matrix.
struct Asked {
  bool left, right;
  int next_rows = 0;
  std::uintptr_t next = 0;
  std::int64_t next_stride = 0;  // bytes
};

// Adds the products of R rows with C rows to one float64 sum for each pair. kTriangle: b is a, and only the
// pairs (r, c <= r) count. All operands of the inner loop are in registers, so each load serves R or C products.
template <class A, class T, int R, int C, bool kTriangle>
void tile(const A* a, std::int64_t a_stride, const T* b, std::int64_t b_stride, std::int64_t columns, double* sums,
          Asked asked) {
  using Vector = typename Lanes<T>::Vector;
  constexpr int lanes = Lanes<T>::count;
  constexpr int pairs = kTriangle ? R * (R + 1) / 2 : R * C;
  // Enough sums in flight to hide the latency of an addition.
  constexpr int accumulators = pairs >= 8 ? 1 : pairs >= 3 ? 2 : 4;
  constexpr std::int64_t chunk = static_cast<std::int64_t>(kFlush) * accumulators * lanes;
  for (std::int64_t start = 0; start < columns;) {
    const std::int64_t stop = Lanes<T>::dtype == DType::f64 || columns - start < chunk ? columns : start + chunk;
    Vector total[accumulators][pairs];
#pragma GCC unroll 32
    for (int i = 0; i < accumulators * pairs; ++i) set_zero(total[i / pairs][i % pairs]);
    for (; start < stop; start += accumulators * lanes) {
#pragma GCC unroll 4
      for (int s = 0; s < accumulators; ++s) {
        const std::int64_t at = start + s * lanes;
        if (asked.left) {
#pragma GCC unroll 5
          for (int r = 0; r < R; ++r) prefetch(a + r * a_stride + at);
        }
        if (asked.right) {
#pragma GCC unroll 5
          for (int c = 0; c < C; ++c) prefetch(b + c * b_stride + at);
        }
        for (int r = 0; r < asked.next_rows; ++r) {
          const std::int64_t bytes = r * asked.next_stride + at * static_cast<std::int64_t>(sizeof(A));
          __builtin_prefetch(reinterpret_cast<const void*>(asked.next + static_cast<std::uintptr_t>(bytes)));
        }
        Vector right[C];
#pragma GCC unroll 5
        for (int c = 0; c < C; ++c) right[c] = load(b + c * b_stride + at);
        int pair = 0;
#pragma GCC unroll 5
        for (int r = 0; r < R; ++r) {
          Vector left;
          if constexpr (kTriangle) {
            left = right[r];
          } else {
            left = load(a + r * a_stride + at);
          }
#pragma GCC unroll 5
          for (int c = 0; c < (kTriangle ? r + 1 : C); ++c, ++pair) {
            total[s][pair] = multiply_add(left, right[c], total[s][pair]);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < accumulators; ++i) flush(total[i], sums);
  }
}

template <class A, class T>
using Tile = void (*)(const A*, std::int64_t, const T*, std::int64_t, std::int64_t, double*, Asked);

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

}  // namespace fl_lightning::cpu::FL_ISA
