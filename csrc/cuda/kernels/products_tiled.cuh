// SPDX-License-Identifier: Apache-2.0
// Products of many rows: tiles of 32 x 32 pairs, with the columns staged in shared memory.
//
// A block computes one tile for one item. Its 256 threads form four groups; a group takes a quarter of the staged
// columns, a thread in it 4 x 4 pairs. Rows of a thread lie 8 apart: then neighbouring lanes read neighbouring rows,
// which the padded pitch spreads over all banks.
#pragma once

#include "partials.cuh"

namespace fl_lightning::cuda {

template <class Real>
constexpr int kPitch = tiled_pitch(sizeof(Real));

template <class Real>
using Quad = Real[4];

// Where the rows [first, first + kTile) of a matrix start.
struct Side {
  const Matrix& matrix;
  std::int64_t first;
  int width;
};

// A thread's share of the columns [column, column + kStage) of one side.
template <class Real>
__device__ inline void fetch(const Side& side, std::int64_t column, const Item& item, Quad<Real> (&to)[kRuns]) {
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    const int run = threadIdx.x + k * kTiledThreads;
    const std::int64_t row = side.first + run / (kStage / 4), at = column + run % (kStage / 4) * 4;
    if (row < side.matrix.rows && at < item.stop) {
      load_widened(side.matrix, row, at, item.start, item.stop, side.width, to[k]);
    } else {
#pragma unroll
      for (int v = 0; v < 4; ++v) to[k][v] = Real{0};
    }
  }
}

template <class Real, class Shared>
__device__ inline void stage(const Quad<Real> (&from)[kRuns], Shared tile) {
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    const int run = threadIdx.x + k * kTiledThreads;
    const int at = run / (kStage / 4) * kPitch<Real> + run % (kStage / 4) * 4;
    store_shared(from[k], tile, at);
  }
}

// Adds the products of the group's columns. A tile on the diagonal needs no pairs above it.
template <bool kDiagonal, class Real, class Shared>
__device__ inline void multiply(Shared left, Shared right, int rows, double (&total)[kEach][kEach]) {
  constexpr int kWide = 16 / sizeof(Real);
  const int group = threadIdx.x / kGroup, y = threadIdx.x % kGroup / kApart, x = threadIdx.x % kApart;
  Real sums[kEach][kEach] = {};
#pragma unroll
  for (int c = 0; c < kBlock; c += kWide) {
    Real a[kEach][kWide], b[kEach][kWide];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      load_shared(left, (y + i * kApart) * kPitch<Real> + group * kBlock + c, a[i]);
      load_shared(right, (x + i * kApart) * kPitch<Real> + group * kBlock + c, b[i]);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i * kApart >= rows) break;
#pragma unroll
      for (int j = 0; j < (kDiagonal ? i + 1 : kEach); ++j) {
#pragma unroll
        for (int v = 0; v < kWide; ++v) sums[i][j] += a[i][v] * b[j][v];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) total[i][j] += sums[i][j];
  }
}

template <bool kSymmetric, class Real>
__global__ void __launch_bounds__(kTiledThreads, sizeof(Real) == 8 ? 1 : 2)
    products_tiled(const Matrix a, const Matrix b, const __grid_constant__ LayerTable table, std::int64_t items,
                   std::int64_t tiles, double* partial) {
  // Tiles of one item run side by side, so that one of them fetches and the others find its rows in the cache.
  const std::int64_t index = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const Item item = find_item(table, index);
  if (skips(item)) return;
  const auto [down, right_of] = tile_pair<kSymmetric>(tile, (b.rows + kTile - 1) / kTile);
  const bool diagonal = kSymmetric && down == right_of;
  std::int64_t column = item.start;
  visit_row(a, 0, [&](auto* values) { column = aligned_start(values, item.start); });
  const Side left{a, down * kTile, vector_width(a, column)}, right{b, right_of * kTile, vector_width(b, column)};
  const int rows = static_cast<int>(a.rows - left.first < kTile ? a.rows - left.first : kTile);

  SHARED(Real, left_tile, kTile * kPitch<Real>);
  SHARED(Real, right_tile, kTile * kPitch<Real>);
  Quad<Real> left_next[kRuns], right_next[kRuns];
  double total[kEach][kEach] = {};
  fetch(left, column, item, left_next);
  if (!diagonal) fetch(right, column, item, right_next);
  for (; column < item.stop; column += kStage) {
    stage(left_next, left_tile);
    if (!diagonal) stage(right_next, right_tile);
    __syncthreads();
    if (column + kStage < item.stop) {  // these loads wait behind the products of what is staged
      fetch(left, column + kStage, item, left_next);
      if (!diagonal) fetch(right, column + kStage, item, right_next);
    }
    if (diagonal) {
      multiply<true, Real>(left_tile, left_tile, rows, total);
    } else {
      multiply<false, Real>(left_tile, right_tile, rows, total);
    }
    __syncthreads();
  }

  SHARED(double, sums, kTile* kTile);
  const int group = threadIdx.x / kGroup, y = threadIdx.x % kGroup / kApart, x = threadIdx.x % kApart;
  for (int g = 1; g < kGroups; ++g) {
    for (int k = 0; k < kEach * kEach && group == g; ++k) {
      sums[(y + k / kEach * kApart) * kTile + x + k % kEach * kApart] = total[k / kEach][k % kEach];
    }
    __syncthreads();
    for (int k = 0; k < kEach * kEach && group == 0; ++k) {
      total[k / kEach][k % kEach] += sums[(y + k / kEach * kApart) * kTile + x + k % kEach * kApart];
    }
    __syncthreads();
  }
  const Grid<kSymmetric> grid{left.first, right.first, a.rows, b.rows, items, index};
  bool bad = false;
#pragma unroll
  for (int k = 0; k < kEach * kEach; ++k) {
    const std::int64_t at = grid.place(y + k / kEach * kApart, x + k % kEach * kApart);
    if (group > 0 || at < 0) continue;
    const double sum = total[k / kEach][k % kEach];
    partial[at] = sum;
    bad |= !isfinite(sum);
  }
  const auto place = [&](int e) { return grid.place(e / kTile, e % kTile); };
  sum_again(bad, item, kTile * kTile, partial, place, [&](int e, std::int64_t c) {
    return element(a, left.first + e / kTile, c) * element(b, right.first + e % kTile, c);
  });
}

template <bool kSymmetric>
void tiled_products(const char* op, Matrix a, Matrix b, const LayerTable& table, std::int64_t items, double* partial,
                    const Context& context) {
  const std::int64_t down = (a.rows + kTile - 1) / kTile, across = (b.rows + kTile - 1) / kTile;
  const std::int64_t tiles = kSymmetric ? triangle(down) : down * across;
  const auto kernel = wide(a) || wide(b) ? products_tiled<kSymmetric, double> : products_tiled<kSymmetric, float>;
  launch(op, kernel, items * tiles, kTiledThreads, context, a, b, table, items, tiles, partial);
}

}  // namespace fl_lightning::cuda
