// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "products.h"

namespace fl_lightning::cpu {

// A row at a time, as a Gram matrix of one row: its bits depend on no other row.
void layer_squares(Matrix rows, Layers layers, double* squares, ParallelFor parallel) {
  const std::int64_t size = size_of(rows.dtype);
  std::vector<double> own(static_cast<std::size_t>(layers.count));
  for (std::int64_t i = 0; i < rows.rows; ++i) {
    const Matrix row{static_cast<const char*>(rows.data) + i * rows.stride * size, 1, rows.columns, rows.stride,
                     rows.dtype};
    layer_products({{row}, {row}, true}, layers, own.data(), parallel);
    for (std::int64_t l = 0; l < layers.count; ++l) squares[l * rows.rows + i] = own[static_cast<std::size_t>(l)];
  }
}

}  // namespace fl_lightning::cpu
