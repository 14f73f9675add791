// SPDX-License-Identifier: Apache-2.0
// Products of many rows on tensor cores: blocks of 64 x 64 pairs, of which a warp has 32 x 16, in tiles of 16 x 8.
//
// Shared memory holds rows as words of 32 bits: a float32 number, or two of 16 bits. A lane reads two neighbouring
// words of a row and passes them on as the two that mma wants four (or eight) columns apart. That is another order of
// the columns, the same for both sides, and a sum of products does not mind.
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

constexpr int kMmaRows = 64, kMmaThreads = 256, kWarpRows = 32, kWarpColumns = 16, kGroupRows = 8;
constexpr int kWarpsDown = kMmaRows / kWarpRows, kWarpsAcross = kMmaRows / kWarpColumns;
static_assert(kWarpsDown * kWarpsAcross * kWarp == kMmaThreads);
constexpr int kWords = 32;               // of a row in shared memory at a time
constexpr int kPitchWords = kWords + 8;  // four rows then cover all banks, with the eight words that a step reads
constexpr int kTileWords = kMmaRows * kPitchWords;
constexpr int kStepWords = 8, kStages = 2;  // words of a row per mma; stages per float32 sum
constexpr int kPieces = kWords / 4, kFetches = kMmaRows * kPieces / kMmaThreads;  // pieces of 16 bytes

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
  return {rows + first * matrix.stride, matrix.stride, matrix.rows - first, piece_width(rows, matrix.stride, column)};
}

// A thread's pieces of the columns from column on.
template <class T>
__device__ inline void fetch_words(const MmaSide<T>& side, std::int64_t column, const Item& item,
                                   Run<T> (&to)[kFetches][1]) {
#pragma unroll
  for (int k = 0; k < kFetches; ++k) {
    const int piece = threadIdx.x + k * kMmaThreads, row = piece / kPieces;
    const std::int64_t at = column + piece % kPieces * kRun<T>;
    const bool any = row < side.count && at < item.stop;
    load_runs(side.rows + row * side.stride, 0, any ? 1 : 0, at, item.start, item.stop, side.width, to[k]);
  }
}

template <class T, class Shared>
__device__ inline void stage_words(const Run<T> (&from)[kFetches][1], Shared tile) {
#pragma unroll
  for (int k = 0; k < kFetches; ++k) {
    const int piece = threadIdx.x + k * kMmaThreads;
    unsigned words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (std::is_same_v<T, float>) {
        words[w] = __float_as_uint(from[k][0].stored[w]);
      } else {
        words[w] = from[k][0].stored[w];
      }
    }
    store_shared(words, tile, piece / kPieces * kPitchWords + piece % kPieces * 4);
  }
}

// A lane's two words of one row, as mma takes them.
template <class T>
struct Pair {
  unsigned big[2], small[std::is_same_v<T, float> ? 2 : 1];

  __device__ void set(const unsigned (&words)[2]) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      big[w] = words[w];
      if constexpr (std::is_same_v<T, float>) {
        // To nearest, and what is left cut off. What is not finite, or becomes it here, leaves a part that is not.
        big[w] = (words[w] + 0x1000u) & kTf32Bits;
        small[w] = __float_as_uint(__uint_as_float(words[w]) - __uint_as_float(big[w])) & kTf32Bits;
      }
    }
  }
};

// The products of 8 + 8 rows with 8 others.
template <class T>
__device__ inline void add_products(const Pair<T>& upper, const Pair<T>& lower, const Pair<T>& other, float (&sum)[4]) {
  const unsigned big[4] = {upper.big[0], lower.big[0], upper.big[1], lower.big[1]};
  float next[4] = {};
  if constexpr (std::is_same_v<T, float>) {
    const unsigned small[4] = {upper.small[0], lower.small[0], upper.small[1], lower.small[1]};
    mma<T>(next, small, other.big);
    mma<T>(next, big, other.small);
  }
  mma<T>(next, big, other.big);
#pragma unroll
  for (int c = 0; c < 4; ++c) sum[c] += next[c];
}

// The products of the staged words that belong to one warp; wanted has one bit per tile.
template <class T, class Shared>
__device__ inline void multiply_words(Shared left, Shared right, unsigned wanted, float (&sums)[4][4]) {
  const int at = threadIdx.x % kWarp / 4 * kPitchWords + threadIdx.x % 4 * 2;
#pragma unroll 1
  for (int step = 0; step < kWords; step += kStepWords) {
    Pair<T> rows[4], others[2];
    unsigned words[2];
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      load_shared(left, at + g * kGroupRows * kPitchWords + step, words);
      rows[g].set(words);
    }
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      load_shared(right, at + g * kGroupRows * kPitchWords + step, words);
      others[g].set(words);
    }
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      if (wanted >> tile & 1u) add_products(rows[tile / 2 * 2], rows[tile / 2 * 2 + 1], others[tile % 2], sums[tile]);
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
  if (skips(table, item)) return;
  const std::int64_t across = (b.rows + kMmaRows - 1) / kMmaRows;
  std::int64_t down = own / across, right_of = own % across;
  if (kSymmetric) {
    for (down = 0; triangle(down + 1) <= own;) ++down;
    right_of = own - triangle(down);
  }
  const bool diagonal = kSymmetric && down == right_of;
  std::int64_t column = aligned_start(static_cast<const T*>(a.data), item.start);
  const MmaSide<T> left = mma_side<T>(a, down * kMmaRows, column), right = mma_side<T>(b, right_of * kMmaRows, column);

  // Of a block on the diagonal some warps have nothing: in the next block of the multiprocessor it is others.
  const int lane = threadIdx.x % kWarp;
  const int warp = static_cast<int>((threadIdx.x / kWarp + index) % (kWarpsDown * kWarpsAcross));
  const int row = warp / kWarpsAcross * kWarpRows, other = warp % kWarpsAcross * kWarpColumns;
  unsigned wanted = 0;
  for (int tile = 0; tile < 4; ++tile) {
    const int r = row + tile / 2 * 2 * kGroupRows, c = other + tile % 2 * kGroupRows;
    const bool above = diagonal && c >= r + 2 * kGroupRows;
    if (r < left.count && c < right.count && !above) wanted |= 1u << tile;
  }

  SHARED(unsigned, tiles, kStages * 2 * kTileWords);
  Run<T> left_next[kFetches][1], right_next[kFetches][1];
  float sums[4][4] = {};
  double total[4][4] = {};
  fetch_words(left, column, item, left_next);
  if (!diagonal) fetch_words(right, column, item, right_next);
  for (int stage = 0; column < item.stop; stage ^= 1) {
    const auto left_tile = tiles + stage * 2 * kTileWords, right_tile = left_tile + (diagonal ? 0 : kTileWords);
    stage_words(left_next, left_tile);
    if (!diagonal) stage_words(right_next, right_tile);
    __syncthreads();  // the other stage's words are no longer read, either
    column += kPieces * kRun<T>;
    if (column < item.stop) {  // these loads wait behind the products of what is staged
      fetch_words(left, column, item, left_next);
      if (!diagonal) fetch_words(right, column, item, right_next);
    }
    if (wanted) multiply_words<T>(left_tile + row * kPitchWords, right_tile + other * kPitchWords, wanted, sums);
    if (stage == 1) flush_sums(sums, total);
  }
  flush_sums(sums, total);

#pragma unroll
  for (int k = 0; k < 16; ++k) {
    const int tile = k / 4, c = k % 4;
    const int y = row + (tile / 2 * 2 + c / 2) * kGroupRows + lane / 4;
    const int x = other + tile % 2 * kGroupRows + lane % 4 * 2 + c % 2;
    const std::int64_t i = down * kMmaRows + y, j = right_of * kMmaRows + x;
    if (i >= a.rows || j >= b.rows || (kSymmetric && j > i)) continue;
    partial[(kSymmetric ? triangle(i) + j : i * b.rows + j) * items + index] = total[tile][c];
  }
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
