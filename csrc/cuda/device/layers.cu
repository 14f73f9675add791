// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "layers.cuh"

namespace fl_lightning::cuda {
namespace {

struct Offsets {
  std::int64_t values[kNearLayers];
};

__global__ void write_offsets(const __grid_constant__ Offsets offsets, std::int64_t count, std::int64_t* to) {
  for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) to[i] = offsets.values[i];
}

}  // namespace

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
  for (std::int64_t first = 0; first < entries; first += kNearLayers) {
    Offsets part = {};
    const std::int64_t count = std::min<std::int64_t>(kNearLayers, entries - first);
    std::copy_n(layers.offsets + first, count, part.values);
    launch(op, write_offsets, 1, 128, context, part, count, far + first);
  }
  table.far = far;
  return table;
}

}  // namespace fl_lightning::cuda
