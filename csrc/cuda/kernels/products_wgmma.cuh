// SPDX-License-Identifier: Apache-2.0
// Products of rows with rows on Hopper's tensor cores: one block has all rows of an item, and reads each number once.
//
// Products of 16-bit numbers are exact, and tensor cores take both sides from shared memory. Of a float32 number x they
// ignore the last 13 bits (PTX does not say so; its users rely on it): it counts as t, its first 11 bits. What is left,
// r = x - t, counts as s = (1 + c) r - c^2/2 t, c = 2^-11, rounded to 11 bits. The rows of one side are in registers,
// where s is computed, or in shared memory too; there they share its bandwidth with the other side. In all
//
//     t t' + s t' + t s' = x x' - (r - c t) (r' - c t') + what the rounding of s changes.
//
// The first difference is at most 2^-22 of x x', because r lies between 0 and 2 c t; without c, it would be four times
// as much. The second is at most 2^-21, to either side. Of one group of rows with itself, S = t t' + 2 s t' is enough:
// half of S and of its transpose.
//
// A chain of instructions starts from zero and adds up 16 columns (of 16-bit numbers: 64), the small parts first; PTX
// leaves open how it rounds, devices so far cut off. Its sum goes to a float32 sum rounded to nearest, and that one
// after eight chains to a float64 sum. By what is known of the H100, which aligns products 25 bits below the leading
// one, and as measured on an H200, the error is below 3e-7 of the product of the two norms on rows that look random,
// below 8e-7 on constant rows or rows of one sign, and below 2e-6 of the sum of the absolute products on any rows.
// Products of small parts below float32's range vanish: elements below 1e-17.
#pragma once

#include <iterator>

#include "../device/warpgroup.cuh"
#include "partials.cuh"

namespace fl_lightning::cuda {

// The table of tiles, and its line for so many groups of so many rows.
template <bool kSymmetric>
constexpr const auto& wgmma_tiles() {
  if constexpr (kSymmetric) {
    return kWgmmaGram;
  } else {
    return kWgmmaCross;
  }
}
template <bool kSymmetric>
constexpr WgmmaTiles wgmma_line(int group, int groups) {
  for (const WgmmaTiles& line : wgmma_tiles<kSymmetric>()) {
    if (line.group == group && line.groups == groups) return line;
  }
  return {};
}

// What lies where. A group has kRows rows; a warpgroup multiplies one group with another. Symmetric: those on and below
// the diagonal. Otherwise each 64 of the rows, or at most 16, with the others, which are one group and come first.
template <class T, int kRows, int kGroups, bool kSymmetric>
struct Plan {
  static constexpr bool kSplit = std::is_same_v<T, float>;
  static constexpr bool kHalves = kSplit && kSymmetric && kGroups == 1;  // S and its transpose
  static constexpr bool kRests = kSplit && !kHalves;                     // small parts are in shared memory
  static constexpr int kWarpgroups = kSymmetric ? kGroups * (kGroups + 1) / 2 : (kGroups > 0 ? kGroups : 1);
  static constexpr int kThreads = kWarpgroups * kWarpgroup;
  static constexpr int kOwn = kSymmetric ? kGroups * kRows : (kGroups > 0 ? kGroups * kWarpgroupRows : 16);
  static constexpr int kOwnFirst = kSymmetric ? 0 : kRows, kHeld = kOwnFirst + kOwn;
  // Spans of a stage, so that 256 neighbouring bytes of a row travel together where there is room.
  static constexpr int kSpans = kSymmetric || !kSplit || kGroups == 0 ? 2 : 1;
  static constexpr int kRuns = kSpans * 8;  // of 16 bytes of a row
  static constexpr int kStages = kDeep + (kRests ? 2 : 0);
  // Tensor cores read 64 rows in any case, behind the last ones whatever is there.
  static constexpr int kLast = kSymmetric ? kRows : kOwn < kWarpgroupRows ? kOwn : kWarpgroupRows;
  static constexpr int kWords = (kStages * kSpans * kHeld + kWarpgroupRows - kLast) * kSpan;
  static constexpr int kBytes = kWords * 4 + kPatternBytes;
  static constexpr WgmmaTiles kLine = wgmma_line<kSymmetric>(kRows, kGroups);
  static constexpr int kBlocks = kSplit ? kLine.blocks : kLine.blocks16;
  static_assert(whole_warps(kThreads) && kThreads % kRuns == 0 && kFlush % (kSpans * (kSplit ? 2 : 1)) == 0);
  static_assert(kBytes + kDeclaredBytes <= kHopperShared);
  static_assert(registers_for(kThreads, kBlocks) >= 2 * kRows + 40);  // a thread has half as many sums, of 4 registers
};

// A thread's rows of one matrix: it brings the same 16 bytes of each stage, of every kApart-th row.
template <class T, int kCount, int kApart, int kRuns>
struct Source {
  const T* from;  // of the next stage, in the first of these rows
  std::int64_t stride;
  int left, width;  // left: rows from the first on

  __device__ Source(const Matrix& matrix, std::int64_t begin) {
    const int first = static_cast<int>(threadIdx.x) / kRuns, at = static_cast<int>(threadIdx.x) % kRuns * kRun<T>;
    const T* rows = static_cast<const T*>(matrix.data);
    from = rows + first * matrix.stride + begin + at;
    stride = matrix.stride * kApart;
    left = static_cast<int>(matrix.rows) - first;
    width = vector_width(rows, matrix.stride, begin);
  }
  // Calls function(number, where its 16 bytes are) for those rows that there are.
  template <class F>
  __device__ void each(F function) const {
    const T* row = from;
#pragma unroll
    for (int k = 0; k < kCount; ++k, row += stride) {
      if (k * kApart < left) function(k, row);
    }
  }
  // Sends for them, or brings them where a part lies outside of the item, which then is 0, or begins at an odd address:
  // start and stop are where the item begins and ends, by the distance from these 16 bytes.
  template <class Shared>
  __device__ void fetch(Shared to, bool inside, int start, int stop) {
    if (inside && width == 16) {
      each([&](int k, const T* row) { COPY_ASYNC_16(to + k * kApart * kSpan, row); });
    } else if (width < 4 || 0 < start || stop < kRun<T>) {
      each([&](int k, const T* row) {
        Run<T> run;
        run.load_part(row, start, stop);
        unsigned words[4];
        memcpy(words, run.stored, 16);
        store_shared(words, to, k * kApart * kSpan);
      });
    } else {
      each([&](int k, const T* row) {
#pragma unroll
        for (int w = 0; w < 4; ++w) COPY_ASYNC_4(to + (k * kApart * kSpan + w), row + w * kRun<T> / 4);
      });
    }
    from += kRuns * kRun<T>;
  }
};

// s of x, or of an even factor so many times s. Tensor cores cut off what is behind its 11 bits.
__device__ inline unsigned small_part(unsigned word, float factor) {
  const float x = __uint_as_float(word), t = __uint_as_float(word & kTf32Bits);
  return __float_as_uint(fmaf(x, factor * (1.0f + 0x1p-11f), -(t * (factor * (1.0f + 0x1p-11f + 0x1p-23f))))) + 0x1000u;
}

// A thread's part of its warpgroup's rows: words of two rows, 8 apart, as wgmma wants them. In place of rows that are
// not there it takes others; their products are never looked at.
struct OwnRows {
  int places[4], apart;  // of the first row's words in a span, in each fourth column; the second row's are so far on

  __device__ OwnRows(int top, int count) {
    const int lane = threadIdx.x % kWarp, row = static_cast<int>(threadIdx.x) / kWarp % 4 * 16 + lane / 4;
#pragma unroll
    for (int k = 0; k < 4; ++k) places[k] = word_at(top + (row < count ? row : 0), k * 4 + lane % 4);
    apart = row + 8 < count ? 8 * kSpan : 0;
  }
  // Of 16 columns: half is 0 or 1.
  template <class Shared>
  __device__ void load(Shared tile, int half, unsigned (&a)[8]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int place = places[k] ^ half * 16;
      a[2 * k] = tile[place];
      a[2 * k + 1] = tile[place + apart];
    }
  }
};

template <class T, int kRows, int kGroups, bool kSymmetric>
__global__ void __launch_bounds__(Plan<T, kRows, kGroups, kSymmetric>::kThreads,
                                  Plan<T, kRows, kGroups, kSymmetric>::kBlocks)
    products_wgmma(const Matrix a, const Matrix b, const __grid_constant__ LayerTable table, std::int64_t items,
                   double* partial) {
#ifdef HAS_WGMMA
  using Plan = Plan<T, kRows, kGroups, kSymmetric>;
  constexpr int kSums = kRows / 2, kSpanWords = Plan::kHeld * kSpan, kTileWords = Plan::kSpans * kSpanWords;
  constexpr int kStep = Plan::kRuns * kRun<T>;  // columns of a stage
  const Item item = find_item(table, blockIdx.x);
  if (skips(item)) return;
  const std::int64_t begin = aligned_start(static_cast<const T*>(a.data), item.start);
  const int start = static_cast<int>(item.start - begin), stop = static_cast<int>(item.stop - begin);

  SHARED_OF_LAUNCH(unsigned, held_rows);
  const auto tiles = held_rows + (kPatternBytes - SHARED_ADDRESS(held_rows) % kPatternBytes) % kPatternBytes / 4;
  constexpr int kApart = Plan::kThreads / Plan::kRuns, kFirst = Plan::kOwnFirst * kSpan;
  Source<T, (Plan::kOwn + kApart - 1) / kApart, kApart, Plan::kRuns> own_rows(a, begin);
  Source<T, (kRows + kApart - 1) / kApart, kApart, Plan::kRuns> others(b, begin);
  const int run = static_cast<int>(threadIdx.x) % Plan::kRuns;
  const int word = run / 8 * kSpanWords + word_at(static_cast<int>(threadIdx.x) / Plan::kRuns, run % 8 * 4);
  const auto fetch = [&](int column, auto tile) {
    const bool inside = column >= start && column + kStep <= stop;
    const int at = column + run * kRun<T>;
    own_rows.fetch(tile + (word + kFirst), inside, start - at, stop - at);
    if constexpr (!kSymmetric) others.fetch(tile + word, inside, start - at, stop - at);
  };
  const auto split_rows = [&](const auto& rows, auto tile, auto rest) {
    rows.each([&](int k, const T*) {
      unsigned words[4];
      load_shared(tile, word + k * kApart * kSpan, words);
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = small_part(words[w], 1.0f);
      store_shared(words, rest, word + k * kApart * kSpan);
    });
  };
  const auto split = [&](auto tile, auto rest) {
    split_rows(own_rows, tile + kFirst, rest + kFirst);
    if constexpr (!kSymmetric) split_rows(others, tile, rest);
  };

  // A warpgroup's groups, and whether a warp has rows that are there.
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup, warp = static_cast<int>(threadIdx.x) / kWarp % 4;
  const int down = kGroups < 2 ? 0 : kSymmetric ? (warpgroup + 1) / 2 : warpgroup;
  const int across = kGroups < 2 || !kSymmetric ? 0 : warpgroup / 2;
  const int row = down * (kSymmetric ? kRows : kWarpgroupRows), other = across * kRows;
  const int count = static_cast<int>(a.rows) - row, other_count = static_cast<int>(b.rows) - other;
  const bool any = warp * 16 < count && (!kSymmetric || warp * 16 < kRows);

  float chain[kSums], sums[kSums] = {};
  double totals[kSums] = {};
  const auto add = [&] {
    WGMMA_WAIT(chain);
    if (!any) return;
#pragma unroll
    for (int k = 0; k < kSums; ++k) sums[k] += chain[k];
  };
  for (int stage = 0; stage < kDeep - 1; ++stage) {
    if (stage * kStep < stop) fetch(stage * kStep, tiles + stage * kTileWords);
    COPY_COMMIT();
  }
  COPY_WAIT(kDeep - 2);
  const auto rests = tiles + kDeep * kTileWords;
  if constexpr (Plan::kRests) split(tiles, rests);
  FENCE_TENSOR_CORES();
  __syncthreads();
  // The same in all lanes, as instructions want it.
  const auto uniform = [](unsigned x) { return __shfl_sync(kFullWarp, x, 0); };
  const unsigned address = SHARED_ADDRESS(tiles);
  const unsigned own = uniform(rows_from(address + (Plan::kOwnFirst + row) * kSpan * 4));
  const unsigned theirs = uniform(rows_from(address + other * kSpan * 4));
  constexpr unsigned kTile = kTileWords * 4 >> 4, kEnd = kDeep * kTile, kStepOn = 32 >> 4;  // as descriptors count
  constexpr unsigned kSpanOn = kSpanWords * 4 >> 4;
  constexpr int kStagesPerFlush = kFlush / Plan::kSpans / (Plan::kSplit ? 2 : 1);
  unsigned at = 0, rest = kEnd;
  int until_flush = kStagesPerFlush;
  const OwnRows fragments(Plan::kOwnFirst + row, count);
  // Starts half a span of float32 rows.
  const auto start_half = [&](unsigned span, int half) {
    unsigned big[8] = {}, small[8] = {};
    if (any) {
      fragments.load(tiles + (at + span) * 4, half, big);
      if constexpr (Plan::kRests) {
        fragments.load(tiles + (rest + span) * 4, half, small);
      } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) small[k] = small_part(big[k], 2.0f);
      }
    }
    const unsigned first = theirs + at + span + half * 2 * kStepOn;
    WGMMA_BEGIN(chain);
#pragma unroll
    for (int k = 0; k < 2; ++k) wgmma(chain, small + 4 * k, first + k * kStepOn, k, other_count);
    if constexpr (Plan::kRests) {
#pragma unroll
      for (int k = 0; k < 2; ++k) wgmma(chain, big + 4 * k, first + (rest - at) + k * kStepOn, 1, other_count);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) wgmma(chain, big + 4 * k, first + k * kStepOn, 1, other_count);
    WGMMA_END(chain);
  };
  // And a whole span of 16-bit rows.
  const auto start_span = [&](unsigned span) {
    WGMMA_BEGIN(chain);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const unsigned from = at + span + k * kStepOn;
      wgmma<T>(chain, own + from, theirs + from, k, count, other_count);
    }
    WGMMA_END(chain);
  };
  // While tensor cores work: a later stage is sent for; the next one is there, and its small parts.
  const auto fetch_later = [&](int column) {
    if (column < stop) fetch(column, tiles + (at == 0 ? kEnd - kTile : at - kTile) * 4);
    COPY_COMMIT();
  };
  const auto prepare_next = [&](bool is_there) {
    COPY_WAIT(kDeep - 2);
    at = at == kEnd - kTile ? 0 : at + kTile;
    if constexpr (Plan::kRests) {
      rest = rest == kEnd ? kEnd + kTile : kEnd;
      if (is_there) split(tiles + at * 4, tiles + rest * 4);
    }
    FENCE_TENSOR_CORES();
  };
  for (int column = 0; column < stop; column += kStep) {
    const bool more = column + kStep < stop;
    if constexpr (Plan::kSplit) {
      start_half(0, 0);
      fetch_later(column + (kDeep - 1) * kStep);
      add();
      start_half(0, 1);
      if constexpr (Plan::kSpans > 1) {
        add();
        start_half(kSpanOn, 0);
        add();
        start_half(kSpanOn, 1);
      }
    } else {
      start_span(0);
      fetch_later(column + (kDeep - 1) * kStep);
      add();
      start_span(kSpanOn);
    }
    prepare_next(more);
    add();
    if (--until_flush == 0 && any) {
      until_flush = kStagesPerFlush;
#pragma unroll
      for (int k = 0; k < kSums; ++k) {
        totals[k] += sums[k];
        sums[k] = 0.0f;
      }
    }
    __syncthreads();  // the next stage is there, and nobody reads this one
  }

  // A row's total with another one, as two words in shared memory; or for half of S, what its transpose has there.
  const Grid<kSymmetric> grid{0, 0, a.rows, b.rows, items, blockIdx.x};
  bool bad = false;
  const auto leave = [&](int y, int x, double total) {
    const std::int64_t at = grid.place(y, x);
    if (at < 0) return;
    partial[at] = total;
    bad |= !isfinite(total);
  };
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    const int y = warp * 16 + static_cast<int>(threadIdx.x) % kWarp / 4 + k / 2 % 2 * 8;
    const int x = k / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + k % 2;
    if (y >= count || x >= other_count || (kSymmetric && y >= kRows)) continue;
    totals[k] += sums[k];
    if constexpr (Plan::kHalves) {
      unsigned words[2];
      memcpy(words, totals + k, 8);
      tiles[(y * kRows + x) * 2] = words[0];
      tiles[(y * kRows + x) * 2 + 1] = words[1];
    } else {
      leave(row + y, other + x, totals[k]);
    }
  }
  if constexpr (Plan::kHalves) {
    __syncthreads();
    const auto of = [&](int y, int x) {
      const unsigned words[2] = {tiles[(y * kRows + x) * 2], tiles[(y * kRows + x) * 2 + 1]};
      double total;
      memcpy(&total, words, 8);
      return total;
    };
    for (int e = threadIdx.x; e < kRows * kRows; e += Plan::kThreads) {
      const int y = e / kRows, x = e % kRows;
      if (y < count && x <= y) leave(y, x, 0.5 * (of(y, x) + of(x, y)));
    }
  }
  const int width = static_cast<int>(b.rows);
  const auto place = [&](int e) { return grid.place(e / width, e % width); };
  sum_again(bad, item, static_cast<int>(a.rows) * width, partial, place, [&](int e, std::int64_t c) {
    const double x = widen<double>(static_cast<const T*>(a.data)[e / width * a.stride + c]);
    return x * widen<double>(static_cast<const T*>(b.data)[e % width * b.stride + c]);
  });
#endif
}

// Calls function with the kernel of the first line with enough rows and others, and its threads and bytes.
template <class T, bool kSymmetric, std::size_t kLine = 0, class F>
void with_wgmma(std::int64_t rows, std::int64_t others, F&& function) {
  if constexpr (kLine < std::size(wgmma_tiles<kSymmetric>())) {
    constexpr WgmmaTiles line = wgmma_tiles<kSymmetric>()[kLine];
    using P = Plan<T, line.group, line.groups, kSymmetric>;
    if (rows > line.rows || others > line.others) return with_wgmma<T, kSymmetric, kLine + 1>(rows, others, function);
    function(products_wgmma<T, line.group, line.groups, kSymmetric>, P::kThreads, P::kBytes);
  }
}

// Whether there is a kernel for these rows, and it is compiled for this device. Where rows lie is no matter: a process
// that holds some of the columns has them at other addresses, and must find the same bits.
template <bool kSymmetric>
bool suits_wgmma(const Matrix& a, const Matrix& b, std::int64_t least) {
  if (a.dtype != b.dtype || wide(a) || a.rows < least) return false;
  bool found = false;
  with_type(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, double>) {
      with_wgmma<T, kSymmetric>(a.rows, b.rows, [&](auto kernel, int, int) {
        cudaFuncAttributes known = {};
        // Compiled for another device, it has no body and hardly a register.
        found = cudaFuncGetAttributes(&known, kernel) == cudaSuccess && known.numRegs > 32;
        if (!found) cudaGetLastError();  // or the next call that has nothing to do with this one would report it
      });
    }
  });
  return found;
}

template <bool kSymmetric>
void wgmma_products(const char* op, Matrix a, Matrix b, const LayerTable& table, std::int64_t items, double* partial,
                    const Context& context) {
  with_type(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, double>) {
      with_wgmma<T, kSymmetric>(a.rows, b.rows, [&](auto kernel, int threads, int bytes) {
        launch_with_shared(op, kernel, items, threads, bytes, context, a, b, table, items, partial);
      });
    }
  });
}

}  // namespace fl_lightning::cuda
