// SPDX-License-Identifier: Apache-2.0
// Inner products of rows with rows, per layer: what layer_gram, layer_cross_gram and layer_dots share.
#pragma once

#include "../ops.h"
#include "kernels/arguments.h"

namespace fl_lightning::cpu {

// out[layer][i][j] for every layer: [L, rows, others].
void layer_products(const Products& problem, Layers layers, double* out, ParallelFor parallel);

}  // namespace fl_lightning::cpu
