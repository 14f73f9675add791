// SPDX-License-Identifier: Apache-2.0
#include "products.h"

namespace fl_lightning::cpu {

void layer_gram(Matrix rows, Layers layers, double* gram, ParallelFor parallel) {
  layer_products({{rows}, {rows}, true}, layers, gram, parallel);
}

}  // namespace fl_lightning::cpu
