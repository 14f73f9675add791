// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "layers.cuh"

namespace fl_lightning::cuda {

LayerTable make_table(const char* op, Layers layers, int shift, const Context& context) {
  LayerTable table = {};
  table.count = layers.count;
  table.shift = shift;
  const std::int64_t entries = layers.count + 1;
  if (layers.count <= kNearLayers) {
    std::copy_n(layers.offsets, entries, table.near);
    return table;
  }
  std::int64_t* far = scratch<std::int64_t>(context, entries);
  copy_in(op, layers.offsets, entries * static_cast<std::int64_t>(sizeof *far), far, context);
  table.far = far;
  return table;
}

}  // namespace fl_lightning::cuda
