// SPDX-License-Identifier: Apache-2.0
// Inner products of rows with rows, per layer: what layer_gram, layer_cross_gram and layer_dots share.
#pragma once

#include <cstdint>

#include "../ops.h"
#include "scratch.h"

namespace fl_lightning::cpu {

// Rows of a matrix: all of them, or as many as are listed.
struct Rows : Matrix {
  const std::int64_t* listed = nullptr;

  // Elements before row r of these.
  std::int64_t at(std::int64_t r) const { return (listed ? listed[r] : r) * stride; }
};

struct Products {
  Rows rows, others;
  bool symmetric;  // others are the rows, and only one half is computed

  std::int64_t pairs() const { return rows.rows * others.rows; }
  // The lesser number of rows stays in the first-level cache while the others pass by: products_passing.h.
  bool passing() const {
    const std::int64_t least = rows.rows < others.rows ? rows.rows : others.rows;
    return !symmetric && least > 3 && least <= 20;
  }
  // More than one tile: each row is read anew for every tile it is in, and the next panel is asked for meanwhile.
  bool many() const { return symmetric && rows.rows > 5; }
};

struct ProductsScratch {
  Scratch sums, left, right;
};

// out[layer][i][j] for every layer: [L, rows, others].
void layer_products(const Products& problem, Layers layers, double* out, ParallelFor parallel);

// Columns that are worked on while they lie in the cache; pieces of tasks are multiples of it where they can be.
std::int64_t panel_columns(const Products& problem);

}  // namespace fl_lightning::cpu
