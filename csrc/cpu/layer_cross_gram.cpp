// SPDX-License-Identifier: Apache-2.0
#include "products.h"

namespace fl_lightning::cpu {

void layer_cross_gram(Matrix rows, Matrix others, Layers layers, double* gram, ParallelFor parallel) {
  layer_products({{rows}, {others}, false}, layers, gram, parallel);
}

void layer_chosen_gram(Matrix rows, Matrix others, const std::int64_t* chosen, std::int64_t count, Layers layers,
                       double* gram, ParallelFor parallel) {
  others.rows = count;
  layer_products({{rows}, {others, chosen}, false}, layers, gram, parallel);
}

}  // namespace fl_lightning::cpu
