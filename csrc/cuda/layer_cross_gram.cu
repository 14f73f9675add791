// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/gram_direct.cuh"
#include "kernels/products_mma.cuh"
#include "kernels/products_tiled.cuh"
#include "kernels/products_wgmma.cuh"

namespace fl_lightning::cuda {

void layer_cross_gram(Matrix rows, Matrix others, Layers layers, double* gram, Context context) {
  constexpr const char* kOp = "layer_cross_gram";
  if (others.rows == 0) return;
  const LayerTable table = make_table(kOp, layers, product_shift(layers, std::max(rows.rows, others.rows)), context);
  const std::int64_t items = item_count(table, rows.columns);
  double* partial = scratch<double>(context, rows.rows * others.rows * items);
  const bool direct = rows.dtype == DType::f32 && others.dtype == DType::f32;
  // Few float32 rows are multiplied as they are: small whole numbers exactly, others to one digit more.
  if (direct && std::max(rows.rows, others.rows) <= kMostDirect) {
    launch(kOp, cross_direct<kCrossSide>, items, kDirectThreads, context, rows, others, table, items, partial);
  } else if (suits_wgmma<false>(rows, others, 1)) {
    wgmma_products<false>(kOp, rows, others, table, items, partial, context);
  } else if (std::max(rows.rows, others.rows) >= kLeastMma && suits_mma(rows, others, kLeastMma16)) {
    mma_products<false>(kOp, rows, others, table, items, partial, context);
  } else {
    tiled_products<false>(kOp, rows, others, table, items, partial, context);
  }
  add_partials<Pairs::all>(kOp, partial, items, table, rows, others, gram, context);
}

}  // namespace fl_lightning::cuda
