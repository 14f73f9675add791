// SPDX-License-Identifier: Apache-2.0
#include "products.h"

namespace fl_lightning::cpu {

void layer_dots(Matrix rows, const void* step, Layers layers, double* dots, ParallelFor parallel) {
  const Matrix one{step, 1, rows.columns, rows.columns, rows.dtype};
  layer_products({{rows}, {one}, false}, layers, dots, parallel);
}

}  // namespace fl_lightning::cpu
