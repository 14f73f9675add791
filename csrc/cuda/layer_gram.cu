// SPDX-License-Identifier: Apache-2.0
#include "kernels/gram_direct.cuh"
#include "kernels/products_mma.cuh"
#include "kernels/products_tiled.cuh"
#include "kernels/products_wgmma.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "layer_gram";

// Whether a thread's registers hold all pairs.
bool few(Matrix rows) { return rows.rows <= (wide(rows) ? kMostWideDirect : kMostDirect); }

}  // namespace

void layer_gram(Matrix rows, Layers layers, double* gram, Context context) {
  const LayerTable table = make_table(kOp, layers, product_shift(layers, rows.rows), context);
  const std::int64_t items = item_count(table, rows.columns), m = rows.rows;
  double* partial = scratch<double>(context, triangle(m) * items);
  if (suits_wgmma<true>(rows, rows, rows.dtype == DType::f32 ? kLeastWgmma : kLeastWgmma16)) {
    wgmma_products<true>(kOp, rows, rows, table, items, partial, context);
  } else if (few(rows)) {
    with_type(rows.dtype, [&](auto zero) {
      using T = decltype(zero);
      with_least(m, std::conditional_t<sizeof(T) == 8, WideDirectSizes, DirectSizes>{}, [&](auto most) {
        launch(kOp, gram_direct<T, most>, items, kDirectThreads, context, static_cast<const T*>(rows.data), rows.stride,
               static_cast<int>(m), table, items, partial);
      });
    });
  } else if (suits_mma(rows, rows, rows.dtype == DType::f32 ? kLeastMma : kLeastMma16)) {
    mma_products<true>(kOp, rows, rows, table, items, partial, context);
  } else {
    tiled_products<true>(kOp, rows, rows, table, items, partial, context);
  }
  add_partials<Pairs::symmetric>(kOp, partial, items, table, rows, rows, gram, context);
}

}  // namespace fl_lightning::cuda
