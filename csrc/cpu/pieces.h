// SPDX-License-Identifier: Apache-2.0
// Columns divided into tasks, and tasks into pieces: the sizes alone decide, never the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/arguments.h"

namespace fl_lightning::cpu {

// Columns of a task: about kTaskNumbers numbers, whole blocks.
inline std::int64_t task_columns(std::int64_t rows) {
  const std::int64_t blocks = kTaskNumbers / kBlockColumns / std::max<std::int64_t>(rows, 1);
  return kBlockColumns * std::max<std::int64_t>(blocks, 1);
}

// Columns of a task of sums: of the nodes of the tree, which are 2^k slices, the least that has about kTaskNumbers
// numbers and of which there are at most kMostParts, because each leaves parts of the sums. Results do not depend on
// it.
inline std::int64_t node_columns(const Layers& layers, std::int64_t rows) {
  const std::int64_t columns = layers.offsets[layers.count];
  const std::int64_t least =
      std::max(kTaskNumbers / std::max<std::int64_t>(rows, 1), (columns + kMostParts - 1) / kMostParts);
  std::int64_t width = layers.slice;
  while (width < least) width *= 2;
  return width;
}

// Sums per layer along the tree of slices, over so many rows. A task is a node. A piece is what one slice has of one
// layer. A task adds up its pieces of a layer. A layer that lies in one task is finished by it. Of another layer each
// task leaves a part of the sum, and finish() adds the parts along the tree. A result is `size` numbers per layer.
class Pieces {
 public:
  Pieces(Layers layers, std::int64_t rows, std::int64_t size, double* out)
      : layers_(layers), width_(node_columns(layers, rows)), size_(size), out_(out) {
    std::int64_t parts = 0;
    for (std::int64_t layer = 0; layer < layers.count; ++layer) {
      first_part_.push_back(parts);
      if (divided(layer)) parts += last_task(layer) - first_task(layer) + 1;
    }
    parts_.resize(static_cast<std::size_t>(parts * size));
  }

  std::int64_t tasks() const { return (columns() + width_ - 1) / width_; }

  // Calls piece(begin, end, result) for each piece of the task.
  template <class Piece>
  void run(std::int64_t task, Piece piece) {
    static thread_local Scratch scratch;
    std::int64_t levels = 0;
    while (layers_.slice << levels < width_) ++levels;
    double* spare = static_cast<double*>(scratch.reserve(levels * size_ * static_cast<std::int64_t>(sizeof(double))));
    const std::int64_t* offsets = layers_.offsets;
    const std::int64_t begin = task * width_, end = std::min(begin + width_, columns());
    std::int64_t layer = std::upper_bound(offsets, offsets + layers_.count + 1, begin) - offsets - 1;
    for (; layer < layers_.count && offsets[layer] < end; ++layer) {
      const std::int64_t from = std::max(begin, offsets[layer]), to = std::min(end, offsets[layer + 1]);
      if (from >= to) continue;
      add_up(from, to, begin, width_, divided(layer) ? part(layer, task) : out_ + layer * size_, spare, piece);
    }
  }

  // Adds the parts of divided layers, and puts zeros for empty ones.
  void finish() {
    for (std::int64_t layer = 0; layer < layers_.count; ++layer) {
      double* out = out_ + layer * size_;
      if (empty(layer)) {
        std::fill(out, out + size_, 0.0);
        continue;
      }
      if (divided(layer)) {
        add_parts(layer);
        std::copy_n(part(layer, first_task(layer)), size_, out);
      }
      // -0.0 is 0.0, as it is where another matrix with other columns adds its nothing.
      for (std::int64_t i = 0; i < size_; ++i) out[i] += 0.0;
    }
  }

 private:
  // The sum over the columns from `from` to `to`, all in the node that begins at `begin` and is `width` wide. Each
  // level below has `size` spare numbers.
  template <class Piece>
  void add_up(std::int64_t from, std::int64_t to, std::int64_t begin, std::int64_t width, double* out, double* spare,
              Piece& piece) const {
    if (width == layers_.slice) return piece(from, to, out);
    const std::int64_t half = width / 2, middle = begin + half;
    if (to <= middle) return add_up(from, to, begin, half, out, spare, piece);
    if (from >= middle) return add_up(from, to, middle, half, out, spare, piece);
    add_up(from, middle, begin, half, out, spare, piece);
    add_up(middle, to, middle, half, spare, spare + size_, piece);
    for (std::int64_t i = 0; i < size_; ++i) out[i] += spare[i];
  }

  // Leaves the sum of a layer's parts in the first one. The sum of a node lies where that of its first task was.
  void add_parts(std::int64_t layer) {
    const std::int64_t first = first_task(layer), last = last_task(layer);
    for (std::int64_t half = 1; half <= last; half *= 2) {
      for (std::int64_t right = half; right <= last; right += 2 * half) {
        if (right <= first) continue;
        const double* from = part(layer, right);
        double* to = part(layer, std::max(first, right - half));
        for (std::int64_t i = 0; i < size_; ++i) to[i] += from[i];
      }
    }
  }

  std::int64_t columns() const { return layers_.offsets[layers_.count]; }
  bool empty(std::int64_t layer) const { return layers_.offsets[layer] == layers_.offsets[layer + 1]; }
  std::int64_t first_task(std::int64_t layer) const { return layers_.offsets[layer] / width_; }
  std::int64_t last_task(std::int64_t layer) const { return (layers_.offsets[layer + 1] - 1) / width_; }
  bool divided(std::int64_t layer) const { return !empty(layer) && first_task(layer) != last_task(layer); }
  double* part(std::int64_t layer, std::int64_t task) {
    return parts_.data() + (first_part_[static_cast<std::size_t>(layer)] + task - first_task(layer)) * size_;
  }

  Layers layers_;
  std::int64_t width_, size_;
  double* out_;
  std::vector<std::int64_t> first_part_;
  std::vector<double> parts_;
};

}  // namespace fl_lightning::cpu
