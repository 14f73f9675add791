// SPDX-License-Identifier: Apache-2.0
// Sums in two stages. In the first stage, the kernels of the products, every block leaves the sums of its item:
// partials. The second stage, here, adds up the partials of each layer along the binary tree over the chunks. A slice
// is a number of whole chunks, a power of two, so its sum is a node of that tree, and so is what a process holds that
// has some of the slices (ops.h). Within a chunk, threads take columns by their distance from an address that is a
// multiple of 16. That is no matter of the slices a process has: each begins a multiple of 8192 columns after the first
// one.
//
// Products of float32 and narrower rows are summed in float32 over kBlock columns, then in float64. The rounding error
// is at most 8.5 * 2^-24 (5.1e-7) of the sum of the absolute products, and far less where many blocks average it out.
// Items too short for that are summed in float64 alone, by the second stage; and what overflows, and rows with
// numbers that are not finite, by the first stage once more.
#pragma once

#include "../device/columns.cuh"
#include "../device/layers.cuh"

namespace fl_lightning::cuda {

// Many rows leave many sums per item: items then have more columns, as far as a slice has them, so that the sums stay
// small beside the rows.
inline int product_shift(const Layers& layers, std::int64_t rows) {
  int shift = chunk_shift(layers);
  while ((std::int64_t{1} << shift) < kColumnsPerRow * rows && (std::int64_t{1} << shift) < layers.slice) ++shift;
  return shift;
}

// Whether the first stage has nothing to do for an item: it is short, or the item of no columns.
__device__ inline bool skips(const Item& item) { return item.stop - item.start <= kShort; }

// Entry e = i (i + 1) / 2 + j of a symmetric matrix, j <= i; or e = i h + j of a rectangular one.
__host__ __device__ inline std::int64_t triangle(std::int64_t i) { return i * (i + 1) / 2; }

// Which products of rows with rows there are.
enum class Pairs { all, symmetric, own };  // own: of each row with itself

// Two tiles of rows whose products one block computes, by number.
struct TilePair {
  std::int64_t down, right_of;
};

// The pair of this number, row by row; of a symmetric product those on and below the diagonal only.
template <bool kSymmetric>
__device__ inline TilePair tile_pair(std::int64_t number, std::int64_t across) {
  if (!kSymmetric) return {number / across, number % across};
  std::int64_t down = 0;
  while (triangle(down + 1) <= number) ++down;
  return {down, number - triangle(down)};
}

// Of one item, the partials of a block's pairs of rows.
template <bool kSymmetric>
struct Grid {
  std::int64_t down, across, rows, others, items, item;

  // Where that of row y and other x of the block stands; -1: it is no pair, or one above the diagonal.
  __device__ std::int64_t place(int y, int x) const {
    const std::int64_t i = down + y, j = across + x;
    if (i >= rows || j >= others || (kSymmetric && j > i)) return -1;
    return (kSymmetric ? triangle(i) + j : i * others + j) * items + item;
  }
};

__device__ inline double element(const Matrix& matrix, std::int64_t row, std::int64_t column) {
  double x = 0.0;
  visit_row(matrix, row, [&](auto* values) { x = widen<double>(values[column]); });
  return x;
}

// A lane's part of the sum of product(column) in float64, on top of an earlier part. Slow: for short items, and for
// what is too large for float32 and fits float64.
template <class Product>
__device__ inline double add_columns(double sum, std::int64_t start, std::int64_t stop, Product product) {
#pragma unroll 4
  for (std::int64_t column = start + threadIdx.x % kWarp; column < stop; column += kWarp) sum += product(column);
  return sum;
}

// The warp's sum over any number of columns. It ends where it has become NaN, which it stays.
template <class Product>
__device__ inline double wide_sum(std::int64_t start, std::int64_t stop, Product product) {
  double sum = 0.0;
  for (; start < stop; start += kShort) {
    sum = add_columns(sum, start, start + kShort < stop ? start + kShort : stop, product);
    if (__ballot_sync(kFullWarp, isnan(sum)) != 0) return NAN;
  }
  return warp_sum(sum);
}

// What float32 could not sum is summed again by the block that has the item, whose warps share it. bad: whether this
// thread has written a partial that is not finite. place(e) is where the block's partial e < count stands (negative:
// not its own), product(e, column) what it sums.
template <class Place, class Product>
__device__ inline void sum_again(bool bad, const Item& item, int count, double* partial, Place place, Product product) {
  if (!__syncthreads_or(bad)) return;
  for (int e = threadIdx.x / kWarp; e < count; e += blockDim.x / kWarp) {
    const std::int64_t at = place(e);
    if (at < 0 || isfinite(partial[at])) continue;
    const double sum = wide_sum(item.start, item.stop, [&](std::int64_t column) { return product(e, column); });
    if (threadIdx.x % kWarp == 0) partial[at] = sum;
  }
}

// The warp's sum over the items of one layer, along the tree over the chunks; the same in every lane. A lane loads the
// partial of one of 32 neighbouring chunks, a group; then the warp may settle what the lanes have.
template <class Load, class Settle>
__device__ inline double layer_sum(const LayerTable& table, std::int64_t layer, Load load, Settle settle) {
  const std::int64_t first = table.first_item(layer) - layer, end = table.end_item(layer) - layer;
  const std::int64_t groups = (end + kWarp - 1) / kWarp;
  const int lane = threadIdx.x % kWarp;
  // In lane k: the sum of the last 2^k groups that are a left node of the tree. 0 where the layer has none of them.
  double left = 0.0;
  for (std::int64_t next = first / kWarp; next < groups; next += kPartialsAhead) {
    double own[kPartialsAhead];
#pragma unroll
    for (int k = 0; k < kPartialsAhead; ++k) {
      const std::int64_t chunk = (next + k) * kWarp + lane;
      own[k] = chunk >= first && chunk < end ? load(chunk + layer) : 0.0;
    }
#pragma unroll
    for (int k = 0; k < kPartialsAhead; ++k) {
      const std::int64_t group = next + k;
      if (group >= groups) break;
      double sum = warp_sum(settle(own[k], group * kWarp + layer));
      int level = 0;
      for (; group >> level & 1; ++level) sum += __shfl_sync(kFullWarp, left, level);
      if (lane == level) left = sum;
    }
  }
  double sum = 0.0;
  for (int level = 0; groups >> level; ++level) {
    if (groups >> level & 1) sum += __shfl_sync(kFullWarp, left, level);
  }
  return sum;
}

template <class Load>
__device__ inline double layer_sum(const LayerTable& table, std::int64_t layer, Load load) {
  return layer_sum(table, layer, load, [](double own, std::int64_t) { return own; });
}

constexpr long long kSkipped = 0x7ff8736b69707321;  // in place of the partial of a short item: a NaN that no sum gives

// One warp per entry and layer. partial[e][item]; out[layer][i][j], or out[layer][i] of each row with itself.
template <Pairs kPairs>
__global__ void __launch_bounds__(kSumThreads, kSumBlocks)
    sum_partials(const double* partial, std::int64_t items, std::int64_t entries,
                 const __grid_constant__ LayerTable table, const Matrix a, const Matrix b, double* out) {
  const std::int64_t index = std::int64_t{blockIdx.x} * (kSumThreads / kWarp) + threadIdx.x / kWarp;
  const std::int64_t layer = index / entries, entry = index % entries;
  if (layer >= table.count) return;
  std::int64_t i = entry / b.rows, j = entry % b.rows;
  if (kPairs == Pairs::own) i = j = entry;
  if (kPairs == Pairs::symmetric) {
    i = static_cast<std::int64_t>((sqrt(8.0 * static_cast<double>(entry) + 1.0) - 1.0) / 2.0);
    i += triangle(i + 1) <= entry ? 1 : 0;
    i -= triangle(i) > entry ? 1 : 0;
    j = entry - triangle(i);
  }
  const auto load = [&](std::int64_t item) {
    return skips(item_of(table, layer, item)) ? __longlong_as_double(kSkipped) : partial[entry * items + item];
  };
  const double sum = layer_sum(table, layer, load, [&](double own, std::int64_t first) {
    for (unsigned lanes = __ballot_sync(kFullWarp, __double_as_longlong(own) == kSkipped); lanes != 0;
         lanes &= lanes - 1) {
      const int lane = __ffs(static_cast<int>(lanes)) - 1;
      const Item item = item_of(table, layer, first + lane);
      const double sum = warp_sum(add_columns(0.0, item.start, item.stop, [&](std::int64_t column) {
        return element(a, i, column) * element(b, j, column);
      }));
      if (threadIdx.x % kWarp == lane) own = sum;
    }
    return own;
  });
  if (threadIdx.x % kWarp > 0) return;
  if (kPairs == Pairs::own) {
    out[layer * entries + entry] = sum;
    return;
  }
  double* matrix = out + layer * a.rows * b.rows;
  matrix[i * b.rows + j] = sum;
  if (kPairs == Pairs::symmetric) matrix[j * b.rows + i] = sum;
}

template <Pairs kPairs>
void add_partials(const char* op, const double* partial, std::int64_t items, const LayerTable& table, Matrix a,
                  Matrix b, double* out, const Context& context) {
  const std::int64_t entries = kPairs == Pairs::own         ? a.rows
                               : kPairs == Pairs::symmetric ? triangle(a.rows)
                                                            : a.rows * b.rows;
  const std::int64_t warps = kSumThreads / kWarp;
  launch(op, sum_partials<kPairs>, (entries * table.count + warps - 1) / warps, kSumThreads, context, partial, items,
         entries, table, a, b, out);
}

}  // namespace fl_lightning::cuda
