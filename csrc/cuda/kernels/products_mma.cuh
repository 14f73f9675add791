// SPDX-License-Identifier: Apache-2.0
// Products of many rows on tensor cores: blocks of 64 x 64 pairs, of which a warp has 32 x 16, in tiles of 16 x 8.
//
// Shared memory holds rows as words of 32 bits: a float32 number, or two of 16 bits; rows 8 apart lie word beside word.
// A lane reads two neighbouring words of two rows at once, and passes a row's two on as those that mma wants four (or
// eight) columns apart. That is another order of the columns, but the same one for both sides: the same products are
// added.
//
// Products of 16-bit numbers are exact. A float32 number is split into two of TF32's 11 bits, big + small, and what is
// lost of it is at most 2^-23 of its size; of the four products all but small * small (at most 2^-22) are added up, the
// small ones first. One mma starts from zero and adds up 8 columns (of 16-bit numbers: 16); PTX leaves open how it
// rounds, devices so far cut off. Its sum goes to a float32 sum rounded to nearest, and that one after 64 (128) columns
// to a float64 sum. By what is known of the A100, the least accurate one, the error is below 2e-7 of the product of the
// two norms on rows that look random, below 5e-7 on constant rows or rows of one sign, and below 2e-6 of the sum of the
// absolute products on any rows. Products that small * big takes below float32's range vanish: elements below 1e-17.
#pragma once

#include "partials.cuh"

namespace fl_lightning::cuda {

constexpr unsigned kAllTiles = 15;

// Where the rows [first, first + kMmaRows) of a matrix start.
template <class T>
struct MmaSide {
  const T* rows;
  std::int64_t stride, count;  // count: rows from the first on
  int width;
};

template <class T>
__device__ inline MmaSide<T> mma_side(const Matrix& matrix, std::int64_t first, std::int64_t column) {
  const T* rows = static_cast<const T*>(matrix.data);
  return {rows + first * matrix.stride, matrix.stride, matrix.rows - first, vector_width(rows, matrix.stride, column)};
}

// A thread's runs of the columns from column on, of two rows.
template <class T>
__device__ inline void fetch_words(const MmaSide<T>& side, std::int64_t column, const Item& item, Run<T> (&to)[2][1]) {
  const int pair = threadIdx.x / kRowRuns;
  const std::int64_t at = column + threadIdx.x % kRowRuns * kRun<T>;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int row = pair / kApartRows * 2 * kApartRows + pair % kApartRows + k * kApartRows;
    const bool any = row < side.count && at < item.stop;
    load_runs(side.rows + row * side.stride, 0, any ? 1 : 0, at, item.start, item.stop, side.width, to[k]);
  }
}

__device__ inline unsigned word_of(float x) { return __float_as_uint(x); }
__device__ inline unsigned word_of(unsigned x) { return x; }

template <class T, class Shared>
__device__ inline void stage_words(const Run<T> (&from)[2][1], Shared tile) {
  const int at = threadIdx.x / kRowRuns * kPitchWords + threadIdx.x % kRowRuns * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] = word_of(from[w % 2][0].stored[half * 2 + w / 2]);
    store_shared(words, tile, at + half * 4);
  }
}

// A lane's words of 16 rows and one step: two of the first eight rows, at 0 and 2, and two of the others.
template <class T>
struct Words {
  unsigned big[4], small[std::is_same_v<T, float> ? 4 : 1];

  template <class Shared>
  __device__ void load(Shared tile, int at) {
    load_shared(tile, at, big);
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        // To nearest, and what is left cut off. What is not finite, or becomes it here, leaves a part that is not.
        const float x = __uint_as_float(big[w]);
        big[w] = (big[w] + 0x1000u) & kTf32Bits;
        small[w] = __float_as_uint(x - __uint_as_float(big[w])) & kTf32Bits;
      }
    }
  }
};

// The products of 16 rows with the first (0) or second (1) eight of 16 others.
template <class T>
__device__ inline void add_products(const Words<T>& rows, const Words<T>& others, int half, float (&sum)[4]) {
  const float zero[4] = {};
  float next[4];
  const unsigned big[2] = {others.big[half], others.big[half + 2]};
  if constexpr (std::is_same_v<T, float>) {
    const unsigned small[2] = {others.small[half], others.small[half + 2]};
    mma<T>(next, rows.small, big, zero);
    mma<T>(next, rows.big, small, next);
    mma<T>(next, rows.big, big, next);
  } else {
    mma<T>(next, rows.big, big, zero);
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) sum[c] += next[c];
}

// The products of the staged words that belong to one warp; wanted has one bit per tile, where not all are.
template <class T, bool kAll, class Shared>
__device__ inline void multiply_words(Shared left, Shared right, unsigned wanted, float (&sums)[4][4]) {
  const int lane = threadIdx.x % kWarp, at = lane / 4 * kPitchWords + lane % 4 * 4;
#pragma unroll 1
  for (int step = 0; step < kWords; step += kStepWords) {
    Words<T> others;
    others.load(right, at + 2 * step);
#pragma unroll
    for (int tile = 0; tile < 4; tile += 2) {
      Words<T> rows;
      rows.load(left, at + 2 * step + tile / 2 * kApartRows * kPitchWords);
      if (kAll || wanted >> tile & 1u) add_products(rows, others, 0, sums[tile]);
      if (kAll || wanted >> tile & 2u) add_products(rows, others, 1, sums[tile + 1]);
    }
  }
}

__device__ inline void flush_sums(float (&sums)[4][4], double (&total)[4][4]) {
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    total[k / 4][k % 4] += sums[k / 4][k % 4];
    sums[k / 4][k % 4] = 0.0f;
  }
}

template <class T, bool kSymmetric>
__global__ void __launch_bounds__(kMmaThreads, 2)
    products_mma(const Matrix a, const Matrix b, const __grid_constant__ LayerTable table, std::int64_t items,
                 std::int64_t blocks, double* partial) {
  // Blocks of one item run side by side, so that one of them fetches and the others find its rows in the cache.
  const std::int64_t index = blockIdx.x / blocks, own = blockIdx.x % blocks;
  const Item item = find_item(table, index);
  if (skips(item)) return;
  const auto [down, right_of] = tile_pair<kSymmetric>(own, (b.rows + kMmaRows - 1) / kMmaRows);
  const bool diagonal = kSymmetric && down == right_of;
  std::int64_t column = aligned_start(static_cast<const T*>(a.data), item.start);
  const MmaSide<T> left = mma_side<T>(a, down * kMmaRows, column), right = mma_side<T>(b, right_of * kMmaRows, column);

  // Of a block on the diagonal some warps have nothing: in the next block of the multiprocessor it is others.
  const int lane = threadIdx.x % kWarp;
  const int warp = static_cast<int>((threadIdx.x / kWarp + index) % (kWarpsDown * kWarpsAcross));
  const int row = warp / kWarpsAcross * kWarpRows, other = warp % kWarpsAcross * kWarpColumns;
  unsigned wanted = 0;
  for (int tile = 0; tile < 4; ++tile) {
    const int r = row + tile / 2 * 2 * kApartRows, c = other + tile % 2 * kApartRows;
    const bool above = diagonal && c >= r + 2 * kApartRows;
    if (r < left.count && c < right.count && !above) wanted |= 1u << tile;
  }

  SHARED(unsigned, tiles, kStages * 2 * kTileWords);
  // A block on the diagonal has one side only, and takes twice the columns at a time: as many bytes are on their way.
  const std::int64_t span = kRowRuns * kRun<T>, later = diagonal ? span : 0;
  Run<T> left_next[2][1], right_next[2][1];
  float sums[4][4] = {};
  double total[4][4] = {};
  fetch_words(left, column, item, left_next);
  fetch_words(right, column + later, item, right_next);
  for (int stage = 0; column < item.stop; stage ^= 1) {
    const auto staged = tiles + stage * 2 * kTileWords;
    stage_words(left_next, staged);
    stage_words(right_next, staged + kTileWords);
    __syncthreads();  // the other stage's words are no longer read, either
    column += span + later;
    if (column < item.stop) {  // these loads wait behind the products of what is staged
      fetch_words(left, column, item, left_next);
      fetch_words(right, column + later, item, right_next);
    }
#pragma unroll 1
    for (int tile = diagonal ? 0 : 1; tile < 2; ++tile) {
      const auto theirs = staged + (tile * kTileWords + other / 2 * kPitchWords);
      const auto ours = staged + ((diagonal ? tile : 0) * kTileWords + row / 2 * kPitchWords);
      if (wanted == kAllTiles) {
        multiply_words<T, true>(ours, theirs, wanted, sums);
      } else if (wanted) {
        multiply_words<T, false>(ours, theirs, wanted, sums);
      }
    }
    if (diagonal || stage == 1) flush_sums(sums, total);
  }
  flush_sums(sums, total);

  const Grid<kSymmetric> grid{down * kMmaRows, right_of * kMmaRows, a.rows, b.rows, items, index};
  bool bad = false;
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    const int tile = k / 4, c = k % 4;
    const int y = row + (tile / 2 * 2 + c / 2) * kApartRows + lane / 4;
    const int x = other + tile % 2 * kApartRows + lane % 4 * 2 + c % 2;
    const std::int64_t at = grid.place(y, x);
    if (at < 0) continue;
    partial[at] = total[tile][c];
    bad |= !isfinite(total[tile][c]);
  }
  const auto place = [&](int e) { return grid.place(e / kMmaRows, e % kMmaRows); };
  sum_again(bad, item, kMmaRows * kMmaRows, partial, place, [&](int e, std::int64_t c) {
    const double x = widen<double>(left.rows[e / kMmaRows * left.stride + c]);
    return x * widen<double>(right.rows[e % kMmaRows * right.stride + c]);
  });
}

// Whether tensor cores are there for these rows, and enough rows for them.
inline bool suits_mma(const Matrix& a, const Matrix& b, std::int64_t least) {
  if (a.dtype != b.dtype || wide(a) || a.rows < least || b.rows < least) return false;
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 8;
}

template <bool kSymmetric>
void mma_products(const char* op, Matrix a, Matrix b, const LayerTable& table, std::int64_t items, double* partial,
                  const Context& context) {
  const std::int64_t down = (a.rows + kMmaRows - 1) / kMmaRows, across = (b.rows + kMmaRows - 1) / kMmaRows;
  const std::int64_t blocks = kSymmetric ? triangle(down) : down * across;
  with_type(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, double>) {
      launch(op, products_mma<T, kSymmetric>, items * blocks, kMmaThreads, context, a, b, table, items, blocks,
             partial);
    }
  });
}

}  // namespace fl_lightning::cuda
