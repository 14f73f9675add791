// SPDX-License-Identifier: Apache-2.0
#include "kernels/gram_direct.cuh"
#include "kernels/products_mma.cuh"
#include "kernels/products_tiled.cuh"
#include "kernels/products_wgmma.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "layer_gram";

template <class T, int kRows>
void direct(Matrix rows, const LayerTable& table, std::int64_t items, double* partial, const Context& context) {
  launch(kOp, gram_direct<T, kRows>, items, kDirectThreads, context, static_cast<const T*>(rows.data), rows.stride,
         static_cast<int>(rows.rows), table, items, partial);
}

// Whether a thread's registers hold all pairs.
bool few(Matrix rows) { return rows.rows <= (wide(rows) ? 10 : 16); }

}  // namespace

void layer_gram(Matrix rows, Layers layers, double* gram, Context context) {
  const LayerTable table = make_table(kOp, layers, product_shift(layers, rows.rows), context);
  const std::int64_t items = item_count(table, rows.columns), m = rows.rows;
  double* partial = scratch<double>(context, triangle(m) * items);
  if (suits_wgmma<true>(rows, rows, rows.dtype == DType::f32 ? 17 : 11)) {
    wgmma_products<true>(kOp, rows, rows, table, items, partial, context);
  } else if (few(rows)) {
    with_type(rows.dtype, [&](auto zero) {
      using T = decltype(zero);
      if (m <= 4) return direct<T, 4>(rows, table, items, partial, context);
      if (m <= 8) return direct<T, 8>(rows, table, items, partial, context);
      if (m <= 10) return direct<T, 10>(rows, table, items, partial, context);
      if constexpr (!std::is_same_v<T, double>) {
        if (m <= 12) return direct<T, 12>(rows, table, items, partial, context);
        return direct<T, 16>(rows, table, items, partial, context);
      }
    });
  } else if (suits_mma(rows, rows, rows.dtype == DType::f32 ? kTile + 1 : 17)) {
    mma_products<true>(kOp, rows, rows, table, items, partial, context);
  } else {
    tiled_products<true>(kOp, rows, rows, table, items, partial, context);
  }
  add_partials<Pairs::symmetric>(kOp, partial, items, table, rows, rows, gram, context);
}

}  // namespace fl_lightning::cuda
