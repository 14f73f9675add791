// SPDX-License-Identifier: Apache-2.0
// Inner products of rows with rows over one piece of a layer. Included once per instruction set by every_isa.h.
//
// A piece is computed panel by panel (products_panel_kernel.h), and a panel tile by tile (products_tile_kernel.h).
// Where few rows meet many, products_passing_kernel.h has another order of the same work.
//
// Sums of float32 and 16-bit rows run in float32 lanes, kFlush products in a lane, and are then added in float64: see
// the bound at kFlush. Float64 rows, and rows so large or small that float32 products lose accuracy, run in float64.
#include "products_passing_kernel.h"

namespace fl_lightning::cpu::FL_ISA {

// All pairs of one panel.
template <class A, class T>
void add_tiles(const Products& problem, Panel<A> a, Panel<T> b, std::int64_t columns, double* sums) {
  const Groups left(problem.rows.rows), right(problem.others.rows);
  // The rows of the next panel are shared out among the tiles of this one.
  const std::int64_t tiles = left.count * (left.count + 1) / 2;
  std::int64_t tile = 0;
  const auto next = [&](bool first) {
    const std::int64_t begin = tile * problem.rows.rows / tiles, end = ++tile * problem.rows.rows / tiles;
    if (!problem.many() || !a.in_place) return Asked{first, false};
    const std::int64_t bytes = static_cast<std::int64_t>(sizeof(A)), skipped = (begin * a.stride + columns) * bytes;
    return Asked{false, false, static_cast<int>(end - begin),
                 reinterpret_cast<std::uintptr_t>(a.data) + static_cast<std::uintptr_t>(skipped), a.stride * bytes};
  };
  for (std::int64_t i = 0; i < left.count; ++i) {
    const A* rows = a.data + left.start(i) * a.stride;
    const int r = left.size(i);
    for (std::int64_t j = 0; j < (problem.symmetric ? i : right.count); ++j) {
      const int c = right.size(j);
      find_tile<A, T>(r, c)(
          rows, a.stride, b.data + right.start(j) * b.stride, b.stride, columns, sums,
          problem.symmetric ? next(a.in_place && j == 0) : Asked{a.in_place && j == 0, b.in_place && i == 0});
      sums += kPlaces;
    }
    if constexpr (Lanes<A>::in_place) {
      if (!problem.symmetric) continue;
      find_triangle<T>(r)(rows, a.stride, rows, a.stride, columns, sums, next(a.in_place && i == 0));
      sums += kPlaces;
    }
  }
}

// Puts the sums of add_tiles in order.
inline void collect(const Products& problem, const double* sums, double* out) {
  const Groups left(problem.rows.rows), right(problem.others.rows);
  const std::int64_t others = problem.others.rows;
  for (std::int64_t i = 0; i < left.count; ++i) {
    for (std::int64_t j = 0; j < (problem.symmetric ? i + 1 : right.count); ++j, sums += kPlaces) {
      const double* sum = sums;
      for (std::int64_t r = left.start(i); r < left.start(i + 1); ++r) {
        const std::int64_t end = problem.symmetric && i == j ? r + 1 : right.start(j + 1);
        for (std::int64_t c = right.start(j); c < end; ++c, ++sum) {
          out[r * others + c] = *sum;
          if (problem.symmetric) out[c * others + r] = *sum;
        }
      }
    }
  }
}

template <class T>
void sum_products(const Products& problem, std::int64_t begin, std::int64_t end, double* out,
                  ProductsScratch& scratch) {
  const std::int64_t places = Groups(problem.rows.rows).count * Groups(problem.others.rows).count * kPlaces;
  double* sums = static_cast<double*>(scratch.sums.reserve(places * static_cast<std::int64_t>(sizeof(double))));
  for (std::int64_t i = 0; i < places; ++i) sums[i] = 0;

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
          add_tiles<BFloat16, T>(problem, {data + begin, problem.rows.stride, true}, b, padded, sums);
          continue;
        }
        if (problem.rows.dtype == DType::f16) {
          const auto* data = static_cast<const Half*>(problem.rows.data);
          add_tiles<Half, T>(problem, {data + begin, problem.rows.stride, true}, b, padded, sums);
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

template <class T>
void all_products(const Products& problem, std::int64_t begin, std::int64_t end, double* out,
                  ProductsScratch& scratch) {
  problem.passing() ? sum_passing<T>(problem, begin, end, out, scratch)
                    : sum_products<T>(problem, begin, end, out, scratch);
}

inline double square_norm(const Rows& rows, std::int64_t row, std::int64_t begin, std::int64_t end,
                          ProductsScratch& scratch) {
  const std::int64_t size = size_of(rows.dtype);
  const Matrix one{static_cast<const char*>(rows.data) + rows.at(row) * size, 1, rows.columns, rows.stride, rows.dtype};
  double square;
  sum_products<double>({{one}, {one}, true}, begin, end, &square, scratch);
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
    all_products<float>(problem, begin, end, out, scratch);
    if (within_range(problem, begin, end, out, scratch)) return;
  }
  all_products<double>(problem, begin, end, out, scratch);
}

}  // namespace fl_lightning::cpu::FL_ISA
