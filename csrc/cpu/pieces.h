// SPDX-License-Identifier: Apache-2.0
// Columns divided into tasks, and tasks into pieces: the sizes alone decide, never the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../ops.h"
#include "kernels/arguments.h"

namespace fl_lightning::cpu {

// Columns of a task: about 128K elements, whole blocks.
inline std::int64_t task_columns(std::int64_t rows) {
  const std::int64_t blocks = (std::int64_t{1} << 17) / kBlockColumns / std::max<std::int64_t>(rows, 1);
  return kBlockColumns * std::max<std::int64_t>(blocks, 1);
}

// Sums per layer. A task is a stretch of `width` columns, and a piece is what one task has of one layer. A layer that
// lies in one task is finished by it. Of another layer each piece leaves a part of the sum, and finish() adds the parts
// in order of the tasks. A result is `size` numbers per layer.
class Pieces {
 public:
  Pieces(Layers layers, std::int64_t width, std::int64_t size, double* out)
      : layers_(layers), width_(width), size_(size), out_(out) {
    std::int64_t parts = 0;
    for (std::int64_t layer = 0; layer < layers.count; ++layer) {
      first_part_.push_back(parts);
      if (divided(layer)) parts += last_task(layer) - first_task(layer) + 1;
    }
    parts_.resize(static_cast<std::size_t>(parts * size));
  }

  std::int64_t tasks() const { return (columns() + width_ - 1) / width_; }

  // Calls piece(begin, end, result) for each layer that has columns in the task.
  template <class Piece>
  void run(std::int64_t task, Piece piece) {
    const std::int64_t* offsets = layers_.offsets;
    const std::int64_t begin = task * width_, end = std::min(begin + width_, columns());
    std::int64_t layer = std::upper_bound(offsets, offsets + layers_.count + 1, begin) - offsets - 1;
    for (; layer < layers_.count && offsets[layer] < end; ++layer) {
      const std::int64_t from = std::max(begin, offsets[layer]), to = std::min(end, offsets[layer + 1]);
      if (from < to) piece(from, to, divided(layer) ? part(layer, task) : out_ + layer * size_);
    }
  }

  // Adds the parts of divided layers, and puts zeros for empty ones.
  void finish() {
    for (std::int64_t layer = 0; layer < layers_.count; ++layer) {
      if (!empty(layer) && !divided(layer)) continue;
      double* out = out_ + layer * size_;
      std::fill(out, out + size_, 0.0);
      if (empty(layer)) continue;
      for (std::int64_t task = first_task(layer); task <= last_task(layer); ++task) {
        const double* from = part(layer, task);
        for (std::int64_t i = 0; i < size_; ++i) out[i] += from[i];
      }
    }
  }

 private:
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
