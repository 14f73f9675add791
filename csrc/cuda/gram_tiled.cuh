// SPDX-License-Identifier: Apache-2.0
// Products of many rows: tiles of 32 x 32 pairs, with the columns staged in shared memory.
//
// A block computes one tile for one item. Its 256 threads form four groups; a group takes a quarter of the staged
// columns, a thread in it 4 x 4 pairs. Rows of a thread lie 8 apart: then neighbouring lanes read neighbouring rows,
// which the padded pitch spreads over all banks.
#pragma once

#include "partials.cuh"

namespace fl_lightning::cuda {

constexpr int kTile = 32, kTiledThreads = 256, kEach = 4, kApart = kTile / kEach;
constexpr int kStage = 64;  // columns in shared memory at a time
constexpr int kGroup = kApart * kApart, kGroups = kTiledThreads / kGroup;
static_assert(kStage / kGroups == kBlock);
constexpr int kRuns = kTile * kStage / 4 / kTiledThreads;  // runs of 4 columns that a thread stages per tile of rows
template <class Real>
constexpr int kPitch = kStage + 16 / sizeof(Real);

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

// Adds the products of the group's columns. Below the diagonal of a tile of its own kind nothing is missing.
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

}  // namespace fl_lightning::cuda
