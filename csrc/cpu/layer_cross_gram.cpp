// SPDX-License-Identifier: Apache-2.0
#include "products.h"

namespace fl_lightning::cpu {

void layer_cross_gram(Matrix rows, Matrix others, Layers layers, double* gram, ParallelFor parallel) {
  layer_products({rows, others, false}, layers, gram, parallel);
}

}  // namespace fl_lightning::cpu
