// SPDX-License-Identifier: Apache-2.0
// What the ops hand to their kernels, where it is more than pointers and sizes.
#pragma once

#include <cstdint>

#include "../../tiles.h"
#include "rows.h"
#include "scratch.h"

namespace fl_lightning::cpu {

// Inner products of rows with rows: layer_gram, layer_cross_gram, layer_chosen_gram and layer_dots.
struct Products {
  Rows rows, others;
  bool symmetric;  // others are the rows, and only one half is computed

  std::int64_t pairs() const { return rows.rows * others.rows; }
  // The lesser number of rows stays in the first-level cache while the others pass by: products_passing_kernel.h.
  bool passing() const {
    const std::int64_t least = rows.rows < others.rows ? rows.rows : others.rows;
    return !symmetric && least >= kPassedLeast && least <= kPassedMost;
  }
  // More than one tile: each row is read anew for every tile it is in, and the next panel is asked for meanwhile.
  bool many() const { return symmetric && rows.rows >= kManyRows; }
};

struct ProductsScratch {
  Scratch sums, left, right;
};

// Columns of a panel: they are worked on while they lie in the cache.
std::int64_t panel_columns(const Products& problem);

// Where layer_combine writes.
struct Combine {
  DType dtype;
  void* out;
  bool add, stream;  // stream: write past the caches
};

// Rows of one combination, with their coefficients.
struct Terms {
  const void* const* rows;
  const double* coeff;
  std::int64_t count;
};

struct PucTrack {
  const void* row;
  DType dtype;
  void* counts;
  CountType type;
  // A coordinate is kept if its count is at least `low` where it increases, at most `high` where it does not.
  std::int64_t low, high;
  std::int32_t* keep;
};

struct PucCombine {
  Matrix rows;
  const std::int32_t* keep;
  const double* weights;
  void* out;
  bool stream;  // write past the caches
};

// Puts the lesser of the numbers in two rows into the row `low`.
struct Exchange {
  std::int64_t low, high;
};

struct TrimmedMean {
  Matrix rows;
  std::int64_t trim;
  const Exchange* network;
  std::int64_t exchanges;
  void* out;
};

}  // namespace fl_lightning::cpu
