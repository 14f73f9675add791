// SPDX-License-Identifier: Apache-2.0
// Products of a few rows with many others. Part of products_kernel.h.
//
// The few are copied into strips, which stay in the first-level cache: a strip holds one vector of each of its rows,
// then the next vector of each. The others pass by, two at a time. So each number of theirs serves up to kTall products
// when it arrives, and the next ones arrive meanwhile.
#include "products_panel_kernel.h"

namespace fl_lightning::cpu::FL_ISA {

inline constexpr int kTallPlaces = (kTall * kPassing + 3) / 4 * 4;

// Two rows, or one twice.
template <class A>
struct Pair {
  const A* first;
  std::int64_t distance;  // elements from one to the other
};

// Adds the products of R rows of a strip with C rows, and asks for others that come later.
template <class A, class T, int R, int C>
void tall_tile(const T* strip, Pair<A> b, std::int64_t columns, double* sums, Pair<A> later) {
  using Vector = typename Lanes<T>::Vector;
  constexpr int lanes = Lanes<T>::count;
  constexpr std::int64_t chunk = static_cast<std::int64_t>(kFlush) * lanes;
  for (std::int64_t start = 0; start < columns;) {
    const std::int64_t stop = Lanes<T>::dtype == DType::f64 || columns - start < chunk ? columns : start + chunk;
    Vector total[R * C];
#pragma GCC unroll 32
    for (int i = 0; i < R * C; ++i) set_zero(total[i]);
    for (; start < stop; start += lanes, strip += R * lanes) {
      Vector right[C];
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        __builtin_prefetch(later.first + c * later.distance + start, 0, 2);
        right[c] = load(b.first + c * b.distance + start);
      }
#pragma GCC unroll 10
      for (int r = 0; r < R; ++r) {
        Vector left = load(strip + r * lanes);
        keep_in_register(left);  // else it is loaded once for each product
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) total[r * C + c] = multiply_add(left, right[c], total[r * C + c]);
      }
    }
    flush(total, sums);
  }
}

template <class A, class T>
using TallTile = void (*)(const T*, Pair<A>, std::int64_t, double*, Pair<A>);

// The tile of this size, at most kTall and kPassing.
template <class A, class T, int R = 1, int C = 1>
TallTile<A, T> find_tall_tile(int rows, int others) {
  if constexpr (R < kTall) {
    if (rows > R) return find_tall_tile<A, T, R + 1, C>(rows, others);
  }
  if constexpr (C < kPassing) {
    if (others > C) return find_tall_tile<A, T, R, C + 1>(rows, others);
  }
  return tall_tile<A, T, R, C>;
}

// One row of a strip: vectors lie `step` elements apart, zeros fill up the last ones.
template <class T, class S>
void put_row(const S* from, std::int64_t width, std::int64_t padded, std::int64_t step, T* to) {
  constexpr int lanes = Lanes<T>::count;
  std::int64_t i = 0;
  for (; i + lanes <= width; i += lanes, to += step) {
    prefetch(from + i);
    if constexpr (Lanes<T>::dtype == DType::f64) {
      store(to, widen(from + i));
    } else {
      store(to, load(from + i));
    }
  }
  for (; i < padded; i += lanes, to += step) {
    for (int lane = 0; lane < lanes; ++lane) to[lane] = i + lane < width ? static_cast<T>(widened(from[i + lane])) : 0;
  }
}

template <class T>
void put_strips(const Rows& rows, const Groups& groups, std::int64_t begin, std::int64_t width, std::int64_t padded,
                T* strips) {
  for (std::int64_t group = 0; group < groups.count; ++group) {
    const std::int64_t first = groups.start(group), step = groups.size(group) * Lanes<T>::count;
    for (std::int64_t r = first; r < groups.start(group + 1); ++r) {
      T* to = strips + first * padded + (r - first) * Lanes<T>::count;
      const std::int64_t at = rows.at(r) + begin;
      if (rows.dtype == DType::f32) {
        put_row(static_cast<const float*>(rows.data) + at, width, padded, step, to);
      } else if (rows.dtype == DType::bf16) {
        put_row(static_cast<const BFloat16*>(rows.data) + at, width, padded, step, to);
      } else if (rows.dtype == DType::f16) {
        put_row(static_cast<const Half*>(rows.data) + at, width, padded, step, to);
      } else if constexpr (Lanes<T>::dtype == DType::f64) {
        put_row(static_cast<const double*>(rows.data) + at, width, padded, step, to);
      }
    }
  }
}

// All pairs of one panel. `from` tells where the rows of a panel lie that is used in place.
template <class A, class T>
void add_tall_tiles(const Groups& staying, const T* strips, Panel<A> passing, const Rows& from, std::int64_t columns,
                    double* sums) {
  const std::int64_t rows = from.rows, tiles = (rows + kPassing - 1) / kPassing;
  const auto pair = [&](std::int64_t tile, std::int64_t skipped) {
    const std::int64_t r = tile * kPassing, s = r + 1 < rows ? r + 1 : r;
    const std::int64_t at = passing.in_place ? from.at(r) : r * passing.stride;
    const std::int64_t other = passing.in_place ? from.at(s) : s * passing.stride;
    // As a number: the address of rows of the next panel may lie beyond the matrix.
    const auto first = reinterpret_cast<std::uintptr_t>(passing.data) +
                       static_cast<std::uintptr_t>((at + skipped) * static_cast<std::int64_t>(sizeof(A)));
    return Pair<A>{reinterpret_cast<const A*>(first), other - at};
  };
  for (std::int64_t j = 0; j < tiles; ++j) {
    const int c = static_cast<int>(rows - j * kPassing < kPassing ? rows - j * kPassing : kPassing);
    std::int64_t later = j + kTilesAhead, skipped = 0;
    for (; later >= tiles; later -= tiles) skipped += columns;
    const Pair<A> b = pair(j, 0), ask = pair(later, skipped);
    for (std::int64_t i = 0; i < staying.count; ++i, sums += kTallPlaces) {
      find_tall_tile<A, T>(staying.size(i), c)(strips + staying.start(i) * columns, b, columns, sums, ask);
    }
  }
}

template <class T>
void sum_passing(const Products& problem, std::int64_t begin, std::int64_t end, double* out, ProductsScratch& scratch) {
  const bool swapped = problem.others.rows < problem.rows.rows;
  const Rows &few = swapped ? problem.others : problem.rows, &many = swapped ? problem.rows : problem.others;
  const Groups staying(few.rows, kTall);
  const std::int64_t tiles = (many.rows + kPassing - 1) / kPassing, places = staying.count * tiles * kTallPlaces;
  double* sums = static_cast<double*>(scratch.sums.reserve(places * static_cast<std::int64_t>(sizeof(double))));
  for (std::int64_t i = 0; i < places; ++i) sums[i] = 0;

  const std::int64_t most = panel_columns(problem) * 4 / static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t width; begin < end; begin += width) {
    width = end - begin < most ? end - begin : most;
    if (width > kUnit) width -= width % kUnit;  // the rest is the last panel
    const std::int64_t padded = (width + kUnit - 1) / kUnit * kUnit;
    T* strips = static_cast<T*>(scratch.left.reserve(few.rows * padded * static_cast<std::int64_t>(sizeof(T))));
    put_strips(few, staying, begin, width, padded, strips);
    if constexpr (Lanes<T>::dtype == DType::f32) {
      if (many.dtype == DType::bf16 && width == padded) {
        const auto* data = static_cast<const BFloat16*>(many.data) + begin;
        add_tall_tiles<BFloat16, T>(staying, strips, {data, many.stride, true}, many, padded, sums);
        continue;
      }
      if (many.dtype == DType::f16 && width == padded) {
        const auto* data = static_cast<const Half*>(many.data) + begin;
        add_tall_tiles<Half, T>(staying, strips, {data, many.stride, true}, many, padded, sums);
        continue;
      }
    }
    const Panel<T> passing = panel_of<T>(many, begin, width, scratch.right, true);
    add_tall_tiles<T, T>(staying, strips, passing, many, padded, sums);
  }

  const std::int64_t others = problem.others.rows;
  const double* sum = sums;
  for (std::int64_t j = 0; j < many.rows; j += kPassing) {
    const std::int64_t c = many.rows - j < kPassing ? many.rows - j : kPassing;
    for (std::int64_t i = 0; i < staying.count; ++i, sum += kTallPlaces) {
      for (std::int64_t r = 0; r < staying.size(i) * c; ++r) {
        const std::int64_t still = staying.start(i) + r / c, moved = j + r % c;
        out[swapped ? moved * others + still : still * others + moved] = sum[r];
      }
    }
  }
}

}  // namespace fl_lightning::cpu::FL_ISA
