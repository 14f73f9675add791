// SPDX-License-Identifier: Apache-2.0
// Sums in two stages. In the first stage, the kernels of the products, every block leaves the sums of its item:
// partials. The second stage, here, adds up the partials of each layer in a fixed order.
//
// Products of float32 and narrower rows are summed in float32 over kBlock columns, then in float64. The rounding error
// is at most 8.5 * 2^-24 (5.1e-7) of the sum of the absolute products, and far less where many blocks average it out.
// Layers too short for that are summed in float64 alone, by the second stage.
#pragma once

#include "../device/columns.cuh"
#include "../device/layers.cuh"

namespace fl_lightning::cuda {

constexpr int kBlock = 16, kShort = 256;

// Many rows leave many sums per item: items then have more columns, so that the sums stay small beside the rows.
inline int product_shift(std::int64_t columns, std::int64_t rows) {
  int shift = chunk_shift(columns);
  while ((std::int64_t{1} << shift) < 32 * rows) ++shift;
  return shift;
}

// Whether the first stage has nothing to do for an item.
__device__ inline bool skips(const LayerTable& table, const Item& item) {
  return item.start >= item.stop || table.offset(item.layer + 1) - table.offset(item.layer) <= kShort;
}

// Entry e = i (i + 1) / 2 + j of a symmetric matrix, j <= i; or e = i h + j of a rectangular one.
__host__ __device__ inline std::int64_t triangle(std::int64_t i) { return i * (i + 1) / 2; }

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

__device__ inline double element(const Matrix& matrix, std::int64_t row, std::int64_t column) {
  double x = 0.0;
  visit_row(matrix, row, [&](auto* values) { x = widen<double>(values[column]); });
  return x;
}

// The warp's sum in float64. Slow: for short layers, and for what is too large for float32 and fits float64.
__device__ inline double wide_dot(const Matrix& a, std::int64_t i, const Matrix& b, std::int64_t j, std::int64_t start,
                                  std::int64_t stop) {
  double sum = 0.0;
#pragma unroll 4
  for (std::int64_t c = start + threadIdx.x % kWarp; c < stop; c += kWarp) sum += element(a, i, c) * element(b, j, c);
  return warp_sum(sum);
}

// The warp's sum over the items of one layer, in a fixed order.
__device__ inline double layer_sum(const double* partial, const LayerTable& table, std::int64_t layer) {
  const std::int64_t end = table.end_item(layer);
  double sum = 0.0;
#pragma unroll 4
  for (std::int64_t p = table.first_item(layer) + threadIdx.x % kWarp; p < end; p += kWarp) sum += partial[p];
  return warp_sum(sum);
}

constexpr int kSumThreads = 128;

// One warp per entry and layer. partial[e][item]; out[layer][i][j].
template <bool kSymmetric>
__global__ void __launch_bounds__(kSumThreads, 8)
    sum_partials(const double* partial, std::int64_t items, std::int64_t entries,
                 const __grid_constant__ LayerTable table, const Matrix a, const Matrix b, double* out) {
  const std::int64_t index = std::int64_t{blockIdx.x} * (kSumThreads / kWarp) + threadIdx.x / kWarp;
  const std::int64_t layer = index / entries, entry = index % entries;
  if (layer >= table.count) return;
  std::int64_t i = entry / b.rows, j = entry % b.rows;
  if (kSymmetric) {
    i = static_cast<std::int64_t>((sqrt(8.0 * static_cast<double>(entry) + 1.0) - 1.0) / 2.0);
    i += triangle(i + 1) <= entry ? 1 : 0;
    i -= triangle(i) > entry ? 1 : 0;
    j = entry - triangle(i);
  }
  const std::int64_t start = table.offset(layer), stop = table.offset(layer + 1);
  double sum = stop - start > kShort ? layer_sum(partial + entry * items, table, layer) : NAN;
  if (!isfinite(sum)) sum = wide_dot(a, i, b, j, start, stop);
  if (threadIdx.x % kWarp > 0) return;
  double* matrix = out + layer * a.rows * b.rows;
  matrix[i * b.rows + j] = sum;
  if (kSymmetric) matrix[j * b.rows + i] = sum;
}

template <bool kSymmetric>
void add_partials(const char* op, const double* partial, std::int64_t items, const LayerTable& table, Matrix a,
                  Matrix b, double* out, const Context& context) {
  const std::int64_t entries = kSymmetric ? triangle(a.rows) : a.rows * b.rows;
  const std::int64_t warps = kSumThreads / kWarp;
  launch(op, sum_partials<kSymmetric>, (entries * table.count + warps - 1) / warps, kSumThreads, context, partial,
         items, entries, table, a, b, out);
}

}  // namespace fl_lightning::cuda
