// SPDX-License-Identifier: Apache-2.0
// Gram matrices of 33 to 104 float32 rows on Hopper's tensor cores: one block has all rows of an item, and reads each
// number once. Not run on a GPU yet, so FL_LIGHTNING_WGMMA=1 asks for it; products_mma is there in any case.
//
// Tensor cores take TF32: they ignore the last 13 bits of a float32 word (PTX does not say so; its users rely on it).
// So rows lie in shared memory as they are, and count there as t, the first 11 bits of x = t + r. Against them go, from
// registers, a = t/2 + (1 + c) r - c^2/2 t, c = 2^-11; A is the sum of all a t'. Then
//
//     A + its transpose = the sum of x x' - (r - c t) (r' - c t').
//
// What is lost there is at most 2^-22 of x x', because r lies between 0 and 2 c t; without c, it would be four times as
// much. a is rounded to float32, then split into its first 11 bits (to nearest) and what is left, of which one bit more
// may be cut off: 1.5 * 2^-24 of x in all. Equal numbers lose 2.9e-7 of their product at most. These are two products
// in TF32 for one of float32, where products_mma takes three; small whole numbers are not exact, as they are there.
//
// A chain of instructions starts from zero and adds up 16 columns, the small parts first; PTX leaves open how it
// rounds, devices so far cut off. Its sum goes to a float32 sum rounded to nearest, and that one after 128 columns to a
// float64 sum. By what is known of the H100, which aligns eight products 25 bits below the leading one, the error is
// below 2e-7 of the product of the two norms on rows that look random, below 5e-7 on constant rows or rows of one sign,
// and below 2e-6 of the sum of the absolute products on any rows. Products of small parts below float32's range vanish:
// elements below 1e-17.
#pragma once

#include <cstdlib>
#include <cstring>

#include "../device/warpgroup.cuh"
#include "partials.cuh"

namespace fl_lightning::cuda {

constexpr int kLeastWgmma = 33, kMostWgmma = 104;  // rows; of more, the registers do not hold the sums
constexpr int kDeep = 3;                           // spans of columns in shared memory: two are on their way
constexpr int kFlushSpans = 4;                     // spans that are summed in float32
constexpr int kSpanRuns = kSpan / kRun<float>;
constexpr float kOwnHalf = 0.5f - 0x1p-23f, kOwnRest = 1.0f + 0x1p-11f;  // 1/2 - c^2/2, 1 + c

template <int kRows>
constexpr int kWgmmaThreads = (kRows + kWarpgroupRows - 1) / kWarpgroupRows * kWarpgroup;
template <int kRows>  // that the registers of a multiprocessor hold
constexpr int kWgmmaBlocks = kRows > 64 ? 1 : (kRows > 40 ? 3 : 4);

// The columns of an item, from an aligned one on.
struct Columns {
  const float* rows;
  std::int64_t stride;
  int count, start, stop, width;  // start, stop: of the item, by their distance from the first column of rows
};

// A thread's runs of the rows, in vectors of so many bytes; of 4, each if it lies between start and stop.
template <int kRows, int kBytes, class Shared>
__device__ inline void copy_runs(const float* from, std::int64_t stride, int count, int start, int stop, Shared to) {
  constexpr int kRowsApart = kWgmmaThreads<kRows> / kSpanRuns;
  const int first = static_cast<int>(threadIdx.x) / kSpanRuns;
#pragma unroll
  for (int k = 0; k * kRowsApart < kRows; ++k, from += kRowsApart * stride) {
    const int row = first + k * kRowsApart;
    if ((k + 1) * kRowsApart > kRows && row >= kRows) continue;
#pragma unroll
    for (int v = 0; v < kRun<float>; v += kBytes / 4) {
      const int at = k * kRowsApart * kSpan + v;
      if constexpr (kBytes == 16) {
        COPY_ASYNC_16(to + at, from + v, (row < count));
      } else if constexpr (kBytes == 8) {
        COPY_ASYNC_8(to + at, from + v, (row < count));
      } else {
        COPY_ASYNC_4(to + at, from + v, (row < count && v >= start && v < stop));
      }
    }
  }
}

// Sends for the columns from column on. What lies outside of the item or below the last row becomes 0.
template <int kRows, class Shared>
__device__ inline void fetch_span(const Columns& of, int column, Shared tile) {
  const int first = static_cast<int>(threadIdx.x) / kSpanRuns;
  const int run = static_cast<int>(threadIdx.x) % kSpanRuns * kRun<float>, at = column + run;
  const float* from = of.rows + first * of.stride + at;
  const auto to = tile + word_at(first, run);
  if (at < of.start || at + kRun<float> > of.stop || of.width == 4) {
    copy_runs<kRows, 4>(from, of.stride, of.count, of.start - at, of.stop - at, to);
  } else if (of.width == 8) {
    copy_runs<kRows, 8>(from, of.stride, of.count, 0, 0, to);
  } else {
    copy_runs<kRows, 16>(from, of.stride, of.count, 0, 0, to);
  }
}

// A thread's part of its warpgroup's rows. Below the last row any other will do: these products are never looked at.
template <int kRows>
struct OwnRows {
  bool any;                  // whether the warp has rows that are there
  int row, first[4], apart;  // first: of 16 columns, where the thread's four are in the first row; the second row's are
                             // so far from there

  __device__ OwnRows() {
    const int lane = threadIdx.x % kWarp, top = static_cast<int>(threadIdx.x) / kWarp * 16;
    any = top < kRows;
    row = top + lane / 4;
    const int one = row < kRows ? row : row - kRows, other = row + 8 < kRows ? row + 8 : row + 8 - kRows;
#pragma unroll
    for (int k = 0; k < 4; ++k) first[k] = word_at(one, k * 4 + lane % 4);
    apart = (other - one) * kSpan;
  }
  // Of the columns from column on (0 or 16), a without its first 11 bits of two steps, and those bits.
  template <class Shared>
  __device__ void load(Shared tile, int column, unsigned (&a)[16]) const {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const unsigned word = tile[(first[k / 2] ^ column) + k % 2 * apart];
      const float t = __uint_as_float(word & kTf32Bits), r = __uint_as_float(word) - t;
      const float all = fmaf(t, kOwnHalf, r * kOwnRest);
      a[8 + k] = (__float_as_uint(all) + 0x1000u) & kTf32Bits;
      // Of what is not finite, or becomes it here, this is not, either.
      a[k] = __float_as_uint(all - __uint_as_float(a[8 + k]));
    }
  }
};

template <int kCount>
__device__ inline void flush(float (&sums)[kCount], double (&totals)[kCount]) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    totals[k] += sums[k];
    sums[k] = 0.0f;
  }
}

template <int kRows>
__global__ void __launch_bounds__(kWgmmaThreads<kRows>, kWgmmaBlocks<kRows>)
    gram_wgmma(const float* rows, std::int64_t stride, std::int64_t m, const __grid_constant__ LayerTable table,
               std::int64_t items, double* partial) {
#ifdef HAS_WGMMA
  constexpr int kSums = kRows / 2, kTileWords = kRows * kSpan;
  const Item item = find_item(table, blockIdx.x);
  if (skips(item)) return;
  const std::int64_t begin = aligned_start(rows, item.start);
  const Columns columns{rows + begin,
                        stride,
                        static_cast<int>(m),
                        static_cast<int>(item.start - begin),
                        static_cast<int>(item.stop - begin),
                        vector_width(rows, stride, begin)};
  const OwnRows<kRows> own;

  SHARED_PATTERNS(unsigned, tiles, kDeep* kTileWords);
  float sums[kSums] = {};
  double totals[kSums] = {};
  int next = 0;
  for (int stage = 0; stage < kDeep - 1; ++stage, next += kSpan) {
    if (next < columns.stop) fetch_span<kRows>(columns, next, tiles + stage * kTileWords);
    COPY_COMMIT();
  }
  // The second warpgroup turns to float64 when the first one does not, which then has the tensor cores to itself.
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
  int stage = 0, until_flush = kFlushSpans - group * kFlushSpans / 2;
  for (int column = 0; column < columns.stop; column += kSpan, next += kSpan) {
    COPY_WAIT(kDeep - 2);
    FENCE_TENSOR_CORES();
    __syncthreads();  // all copies of this span are there, and nobody reads the one before
    const auto tile = tiles + stage * kTileWords;
    stage = stage == 0 ? kDeep - 1 : stage - 1;
    if (next < columns.stop) fetch_span<kRows>(columns, next, tiles + stage * kTileWords);
    COPY_COMMIT();
    stage = (stage + 2) % kDeep;
#pragma unroll 1
    for (int half = 0; half < kSpan; half += kSpan / 2) {
      unsigned a[16] = {};
      float chain[kSums];
      if (own.any) own.load(tile, half, a);
      const unsigned address = SHARED_ADDRESS(tile) + half * 4;
      wgmma<kRows>(chain, a, rows_from(address), rows_from(address + 32));
      if (!own.any) continue;
#pragma unroll
      for (int k = 0; k < kSums; ++k) sums[k] += chain[k];
    }
    if (--until_flush == 0 && own.any) {
      flush(sums, totals);
      until_flush = kFlushSpans;
    }
  }
  flush(sums, totals);

  // The pairs on and below the diagonal, then what those above it add.
  const Grid<true> grid{0, 0, m, m, items, blockIdx.x};
  bool bad = false;
  const auto each = [&](auto function) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      function(own.row + k / 2 % 2 * 8, k / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + k % 2, totals[k]);
    }
  };
  each([&](int y, int x, double total) {
    const std::int64_t at = grid.place(y, x);
    if (at < 0) return;
    partial[at] = x == y ? 2.0 * total : total;
    bad |= !isfinite(total);
  });
  __syncthreads();
  each([&](int y, int x, double total) {
    const std::int64_t at = y < x ? grid.place(x, y) : -1;
    if (at < 0) return;
    partial[at] += total;
    bad |= !isfinite(partial[at]);
  });
  const auto place = [&](int e) { return grid.place(e / kRows, e % kRows); };
  sum_again(bad, item, kRows * kRows, partial, place, [&](int e, std::int64_t c) {
    return widen<double>(rows[e / kRows * stride + c]) * widen<double>(rows[e % kRows * stride + c]);
  });
#endif
}

// Calls function with the least number of rows that the kernel is compiled for and that holds m.
template <class F>
auto with_wgmma_rows(std::int64_t m, F&& function) {
  if (m <= 40) return function(std::integral_constant<int, 40>{});
  if (m <= 64) return function(std::integral_constant<int, 64>{});
  if (m <= 80) return function(std::integral_constant<int, 80>{});
  return function(std::integral_constant<int, kMostWgmma>{});
}

// Whether somebody asks for this kernel, and it is compiled for this device: elsewhere it uses no shared memory.
inline bool suits_wgmma(const Matrix& rows) {
  static const bool asked = [] {
    const char* value = std::getenv("FL_LIGHTNING_WGMMA");
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
  if (!asked || rows.dtype != DType::f32 || rows.rows < kLeastWgmma || rows.rows > kMostWgmma) return false;
  cudaFuncAttributes found = {};
  const bool known = with_wgmma_rows(rows.rows, [&](auto count) {
    return cudaFuncGetAttributes(&found, gram_wgmma<decltype(count)::value>) == cudaSuccess;
  });
  if (!known) cudaGetLastError();  // or the next call that has nothing to do with this one would report it
  return known && found.sharedSizeBytes > 0;
}

inline void wgmma_gram(const char* op, Matrix rows, const LayerTable& table, std::int64_t items, double* partial,
                       const Context& context) {
  with_wgmma_rows(rows.rows, [&](auto count) {
    constexpr int kRows = decltype(count)::value;
    launch(op, gram_wgmma<kRows>, items, kWgmmaThreads<kRows>, context, static_cast<const float*>(rows.data),
           rows.stride, rows.rows, table, items, partial);
  });
}

}  // namespace fl_lightning::cuda
