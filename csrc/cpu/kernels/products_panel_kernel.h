// SPDX-License-Identifier: Apache-2.0
// Panels: some columns of all rows, in the format that tiles are computed in. Part of products_kernel.h.
#include "products_tile_kernel.h"

namespace fl_lightning::cpu::FL_ISA {

// Every panel is a multiple of this many columns; zeros fill up the last one.
inline constexpr std::int64_t kUnit = 4 * kFloats;

// Cuts rows into groups of at most `most`, as equal as they can be.
struct Groups {
  explicit Groups(std::int64_t rows, std::int64_t most = kTile) : rows(rows), count((rows + most - 1) / most) {}
  std::int64_t start(std::int64_t group) const {
    const std::int64_t large = rows % count;
    return group * (rows / count) + (group < large ? group : large);
  }
  int size(std::int64_t group) const { return static_cast<int>(start(group + 1) - start(group)); }

  std::int64_t rows, count;
};

// Meanwhile asks for the numbers that come `next` elements later.
template <class T, class S>
void convert(const S* from, std::int64_t count, std::int64_t next, T* to) {
  std::int64_t i = 0;
  for (; i + Lanes<T>::count <= count; i += Lanes<T>::count) {
    prefetch_at(from + i, next * static_cast<std::int64_t>(sizeof(S)));
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
  bool in_place;
};

// Columns of a matrix in format T: where they lie if that will do, else a converted copy, filled up with zeros. Listed
// rows are not evenly spaced: they are used where they lie only with `anywhere`, by a caller that does not need a
// stride.
template <class T>
Panel<T> panel_of(const Rows& rows, std::int64_t begin, std::int64_t width, Scratch& scratch, bool anywhere = false) {
  if (rows.dtype == Lanes<T>::dtype && width % kUnit == 0 && (anywhere || !rows.listed)) {
    return {static_cast<const T*>(rows.data) + begin, rows.stride, true};
  }
  const std::int64_t padded = (width + kUnit - 1) / kUnit * kUnit;
  // Not a power of two: rows would compete for the same lines of the cache.
  const std::int64_t stride = padded + kUnit;
  T* copy = static_cast<T*>(scratch.reserve(rows.rows * stride * static_cast<std::int64_t>(sizeof(T))));
  for (std::int64_t r = 0; r < rows.rows; ++r) {
    // The same columns of the next row; of the last row, the next panel of the first.
    const std::int64_t next = r + 1 < rows.rows ? rows.at(r + 1) - rows.at(r) : width + rows.at(0) - rows.at(r);
    T* to = copy + r * stride;
    const std::int64_t first = rows.at(r) + begin;
    if (rows.dtype == DType::f32) {
      convert(static_cast<const float*>(rows.data) + first, width, next, to);
    } else if (rows.dtype == DType::bf16) {
      convert(static_cast<const BFloat16*>(rows.data) + first, width, next, to);
    } else if (rows.dtype == DType::f16) {
      convert(static_cast<const Half*>(rows.data) + first, width, next, to);
    } else if constexpr (Lanes<T>::dtype == DType::f64) {
      convert(static_cast<const double*>(rows.data) + first, width, next, to);
    }
    for (std::int64_t i = width; i < padded; ++i) to[i] = 0;
  }
  return {copy, stride, false};
}

}  // namespace fl_lightning::cpu::FL_ISA
