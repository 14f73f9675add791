// SPDX-License-Identifier: Apache-2.0
// How one launch covers all layers.
//
// Columns are cut into chunks of a power of two. A work item is the part of one chunk that lies in one layer, and item
// chunk + layer is that part of that chunk and that layer: the numbers rise along the columns and none is used twice,
// so the offsets alone tell which item a block has. Numbers that belong to no columns exist; their blocks do nothing.
#pragma once

#include "device.cuh"

namespace fl_lightning::cuda {

struct LayerTable {
  std::int64_t near[kNearLayers + 1];
  const std::int64_t* far;  // all offsets in device memory, where there are more than near holds
  std::int64_t count;
  int shift;

  __device__ std::int64_t offset(std::int64_t layer) const { return far ? far[layer] : near[layer]; }
  __device__ std::int64_t first_item(std::int64_t layer) const { return (offset(layer) >> shift) + layer; }
  // Past the last item of a layer; equal to first_item for an empty one.
  __device__ std::int64_t end_item(std::int64_t layer) const {
    const std::int64_t stop = offset(layer + 1);
    return stop == offset(layer) ? first_item(layer) : ((stop - 1) >> shift) + layer + 1;
  }
  // The last layer whose position is at most value; positions rise with the layers.
  template <class Position>
  __device__ std::int64_t last_at_most(std::int64_t value, Position position) const {
    std::int64_t low = 0, high = count;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (position(middle) <= value ? low : high) = middle;
    }
    return low;
  }
};

// The columns [start, stop) of one item.
struct Item {
  std::int64_t layer, start, stop;
};

__device__ inline Item item_of(const LayerTable& table, std::int64_t layer, std::int64_t item) {
  const std::int64_t chunk = (item - layer) << table.shift, end = chunk + (std::int64_t{1} << table.shift);
  const std::int64_t from = table.offset(layer), to = table.offset(layer + 1);
  return {layer, from > chunk ? from : chunk, to < end ? to : end};
}

__device__ inline Item find_item(const LayerTable& table, std::int64_t item) {
  return item_of(table, table.last_at_most(item, [&](std::int64_t l) { return table.first_item(l); }), item);
}

// A slice is a number of whole chunks.
inline int chunk_shift(const Layers& layers) {
  int shift = kLeastShift;
  while (shift < kLargestShift && (layers.slice >> shift) > kChunks) ++shift;
  return shift;
}

inline std::int64_t item_count(const LayerTable& table, std::int64_t columns) {
  return (columns >> table.shift) + table.count;
}

// Copies the offsets before it returns, as copy_in does.
LayerTable make_table(const char* op, Layers layers, int shift, const Context& context);

}  // namespace fl_lightning::cuda
