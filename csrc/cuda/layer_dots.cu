// SPDX-License-Identifier: Apache-2.0
#include "kernels/row_products.cuh"

namespace fl_lightning::cuda {

void layer_dots(Matrix rows, const void* step, Layers layers, double* out, Context context) {
  const Matrix other{step, 1, rows.columns, rows.columns, rows.dtype};
  row_products<false>("layer_dots", rows, other, layers, out, context);
}

}  // namespace fl_lightning::cuda
