// SPDX-License-Identifier: Apache-2.0
#include "kernels/row_products.cuh"

namespace fl_lightning::cuda {

void layer_squares(Matrix rows, Layers layers, double* out, Context context) {
  row_products<true>("layer_squares", rows, rows, layers, out, context);
}

}  // namespace fl_lightning::cuda
