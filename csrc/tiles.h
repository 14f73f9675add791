// SPDX-License-Identifier: Apache-2.0
// How kernels divide their work: rows and columns of a tile, threads of a block, what is on its way at once. Each
// number has its reason beside it. "Measured" means benchmarks/README.md, "Ideas for kernels, and what came of them"
// (CPU), or an H200 (CUDA); registers are those that the compiler takes (benchmarks/results/cuda-resources.md).
//
// Most numbers change nothing but the time. Results change in their last bits with kFlush, kShort, kBlock, the tiles of
// products, and the chunks.
#pragma once

#include "ops.h"

namespace fl_lightning::cpu {

// Tiles of products: kTile by kTile, and kTall of few rows by kPassing of many that pass by. By vector registers.
struct ProductTile {
  int square, tall;
};
inline constexpr int kPassing = 2;
inline constexpr ProductTile kTiles32 = {5, 10};    // AVX-512, NEON: 25 sums and 6 operands; 20 sums and 3
inline constexpr ProductTile kTilesAvx2 = {3, 6};   // of 16 registers: 9 and 4; 12 and 3
inline constexpr ProductTile kTilesPlain = {3, 4};  // of 16, one of which an unfused product takes: 9 and 4; 8 and 3
constexpr bool fits(ProductTile tile, int registers) {
  return tile.square * (tile.square + 1) + 1 <= registers && tile.tall * kPassing + kPassing + 1 <= registers;
}
static_assert(fits(kTiles32, 32) && fits(kTilesAvx2, 16) && fits(kTilesPlain, 16));

// Products added in one lane before the lanes are added up and go to float64: the bound in products_tile_kernel.h.
// Measured: 32 takes 0.91 to 0.94 of the time, and misses the bound on constant rows.
inline constexpr int kFlush = 24;
// Pieces up to this long run in float64: too short for rounding errors to average out, and cheap.
inline constexpr std::int64_t kShort = 2048;

// Columns of a panel are a multiple of kPanelStep. All its rows together take the lesser part of a second-level cache.
inline constexpr std::int64_t kPanelStep = 384, kPanelMost = 3072, kPanelNumbers = 96 * 1024;
// So many (symmetric) rows are read anew for every tile, and meanwhile the next panel is asked for. Measured: 0.85.
inline constexpr std::int64_t kManyRows = 6, kManyColumns = 2 * kPanelStep;
// So many rows stay, as strips that take most of a first-level cache, while others pass by. Measured: 0.75; with other
// numbers of columns 0.98 to 1.4 of that, and asked for 1 to 4 or 10 tiles before their turn 0.93 to 1.04.
inline constexpr std::int64_t kPassedLeast = 4, kPassedMost = 20, kTilesAhead = 6;
inline constexpr std::int64_t kStripNumbers = 30 * 1024 / 4, kStripMost = 4 * kPanelStep;
static_assert(kPanelMost % kPanelStep == 0 && kStripNumbers / kPassedMost >= kPanelStep && kShort < kPanelMost);

// Bytes ahead of the use that rows are asked for. Measured: 2 KiB in place of 1 (with kCombineRows) 0.80 to 0.87.
inline constexpr std::int64_t kAhead = 2048;
// puc_track has two streams, of which the cache has room for more. Measured: 0.58; 4 KiB of the row 0.8, 8 KiB 0.65.
inline constexpr std::int64_t kRowAhead = 16384, kCountsAhead = 4096;

// Columns of a block, whose float64 sums (128 KiB) stay in the second-level cache while the rows pass by.
inline constexpr std::int64_t kBlockColumns = 16384;
// Rows of a sweep, and vectors of sums in flight. Memory slows down with the rows that are read side by side; those of
// puc_combine bring their bits, a stream of their own, and have two sums. Measured: 5 in place of 10 rows 0.80 to 0.87
// (with kAhead), 4 in place of 5 0.87 to 0.98; 3 or 6 slower.
inline constexpr int kCombineSums = 8, kMeanSums = 4;
inline constexpr std::int64_t kCombineRows = 5, kMeanRows = 4;

// Numbers of a task: far above the cost of handing one out. At most so many tasks leave parts of sums.
inline constexpr std::int64_t kTaskNumbers = std::int64_t{1} << 17, kMostParts = 128;
inline constexpr std::int64_t kTaskProducts = 1 << 20;  // of project_conflicts: a fraction of a millisecond

// trimmed_mean: columns sorted together, a multiple of all vectors, and of a task; a panel stays in the second-level
// cache. Its width is an odd number of kTrimLanes: measured 0.37 to 1.0.
inline constexpr int kTrimLanes = 32;
inline constexpr std::int64_t kTrimMost = 1024, kTrimPanelBytes = 1 << 17, kTrimTask = 8192;
static_assert(kTrimMost % kTrimLanes == 0 && kTrimTask % kTrimLanes == 0);

// Outputs of as many bytes, with their input, go past the caches: no cache holds them.
inline constexpr std::int64_t kStreamBytes = std::int64_t{1} << 25;

}  // namespace fl_lightning::cpu

namespace fl_lightning::cuda {

constexpr int kWarp = 32;

// Registers of a multiprocessor and of a thread; bytes of shared memory that a block may declare on any device, and ask
// for on Hopper.
constexpr int kRegisters = 64 << 10, kMostRegisters = 255, kDeclaredShared = 48 << 10, kHopperShared = 227 << 10;
// What __launch_bounds__(threads, blocks) leaves a thread; registers come in groups of 8.
constexpr int registers_for(int threads, int blocks) {
  const int left = kRegisters / (threads * blocks) / 8 * 8;
  return left < kMostRegisters ? left : kMostRegisters;
}
constexpr bool whole_warps(int threads) { return threads % kWarp == 0 && threads <= 1024; }

// Numbers of rows that a kernel is compiled for. The first that is enough takes them: more registers, fewer blocks.
template <int... kSizes>
struct Sizes {};

// A launch has 4 KB for all arguments, and from CUDA 12.1 on 32,764 bytes. So many offsets of layers are among them;
// and so many bytes of the host travel as arguments, of which a block copies kCopyEach.
constexpr int kNearLayers = 240, kCopyThreads = 128;
constexpr std::int64_t kCopyPart = 3584, kLargeCopyPart = 32256, kCopyEach = 3584;
static_assert(8 * (kNearLayers + 1) + 256 <= 4096 && kCopyPart + 256 <= 4096 && kLargeCopyPart + 256 <= 32764);

// Columns of a chunk, 2^shift: 16 chunks per slice between these bounds. Enough items for a device to be full to the
// end of a launch, few enough for their sums to be cheap; items of products have 32 columns for each row, so that the
// sums stay small beside the rows. The width of a slice alone decides, so no bits depend on the device.
constexpr int kLeastShift = 11, kLargestShift = 15, kChunks = 16, kColumnsPerRow = 32;
static_assert(kLeastSlice >> kLeastShift >= 1);

// Columns added up in float32 before float64, and columns up to which an item runs in float64: partials.cuh has the
// bound. The second stage has a warp per sum, with so many partials of a lane on their way; it takes 62 registers.
constexpr int kBlock = 16, kShort = 256, kPartialsAhead = 4, kSumThreads = 128, kSumBlocks = 8;
static_assert(whole_warps(kSumThreads) && registers_for(kSumThreads, kSumBlocks) >= 62);

// gram_direct: all pairs of rows in registers, and a run of 16 bytes of each row; of 16 float32 rows 222 registers, so
// two blocks. On Hopper products_wgmma has 11 rows of 16 bits and more, and 17 of float32: fewer stay exact.
constexpr int kDirectThreads = 128, kLeastWgmma = 17, kLeastWgmma16 = 11;
using DirectSizes = Sizes<4, 8, 10, 12, 16>;
using WideDirectSizes = Sizes<4, 8, 10>;  // of float64
constexpr int kMostDirect = 16, kMostWideDirect = 10;
constexpr int direct_registers(int rows, int words) { return rows * (rows + 1) / 2 * words + rows * 4; }
static_assert(whole_warps(kDirectThreads) && direct_registers(kMostDirect, 1) + kWarp <= kMostRegisters);
static_assert(direct_registers(kMostWideDirect, 2) + kWarp <= kMostRegisters);
// cross_direct: a warp has kCrossSide x kCrossSide pairs and a run of each row; its blocks leave 40 registers beside.
constexpr int kCrossSide = 8, kCrossBlocks = 3;
static_assert(2 * kCrossSide >= kMostDirect && kDirectThreads / kWarp == 4 && kLeastWgmma == kMostDirect + 1);
static_assert(kCrossSide * kCrossSide + 2 * kCrossSide * 4 + 40 <= registers_for(kDirectThreads, kCrossBlocks));

// products_tiled: a block has kTile x kTile pairs, a thread kEach x kEach, whose rows lie kApart apart. A group of
// threads has all pairs and kBlock of the columns that are staged. Two blocks for float32 (128 registers), one for
// float64 (174).
constexpr int kTile = 32, kTiledThreads = 256, kEach = 4, kApart = kTile / kEach, kStage = 64;
constexpr int kGroup = kApart * kApart, kGroups = kTiledThreads / kGroup;
constexpr int kRuns = kTile * kStage / 4 / kTiledThreads;  // of 4 columns, that a thread stages per tile of rows
constexpr int tiled_pitch(int bytes) { return kStage + 16 / bytes; }  // one vector more: rows spread over all banks
static_assert(kStage / kGroups == kBlock && kRuns * 4 * kTiledThreads == kTile * kStage);
static_assert(2 * kTile * tiled_pitch(8) * 8 + kTile * kTile * 8 <= kDeclaredShared);

// products_mma: a block has kMmaRows x kMmaRows pairs, a warp 32 x 16, in tiles of 16 x 8. So many words of a row are
// staged at a time, kStepWords of them per instruction; a float32 sum is that of kStages stages. Two blocks (128
// registers). It takes what products_tiled has no single tile for; of 16 bits what fills more than half of one.
constexpr int kMmaRows = 64, kMmaThreads = 256, kWarpRows = 32, kWarpColumns = 16, kApartRows = 8;
constexpr int kLeastMma = kTile + 1, kLeastMma16 = kTile / 2 + 1;
constexpr int kWarpsDown = kMmaRows / kWarpRows, kWarpsAcross = kMmaRows / kWarpColumns;
constexpr int kWords = 32, kRowRuns = kWords / 4, kStepWords = 8, kStages = 2;
constexpr int kPitchWords = 2 * kWords + 16;  // of two rows; two pairs of rows then cover all banks
constexpr int kTileWords = kMmaRows / 2 * kPitchWords;
static_assert(kWarpsDown * kWarpsAcross * kWarp == kMmaThreads && 2 * kMmaThreads == kMmaRows * kRowRuns);
static_assert(kStages * 2 * kTileWords * 4 <= kDeclaredShared);

// products_wgmma. Stages of columns in shared memory, all but one of them on their way; chains in a float32 sum.
constexpr int kDeep = 4, kFlush = 8;
// The first line with enough rows and others takes them. Symmetric: groups of `group` rows, a warpgroup for each pair
// of groups. Otherwise `group` others, and a warpgroup for each 64 rows (groups 0: at most 16 rows). Few pairs leave
// room for more blocks, in which one loads while another multiplies: their number is what the registers hold, which are
// 4 per pair of a thread and 40 or more; shared memory may hold fewer.
struct WgmmaTiles {
  int rows, others, group, groups, blocks, blocks16;  // blocks: of float32, and of 16 bits
};
constexpr WgmmaTiles kWgmmaGram[] = {{16, 16, 16, 1, 5, 5},   {24, 24, 24, 1, 5, 5},  {32, 32, 32, 1, 4, 4},
                                     {40, 40, 40, 1, 4, 4},   {64, 64, 64, 1, 2, 3},  {80, 80, 40, 2, 1, 1},
                                     {112, 112, 56, 2, 1, 1}, {128, 128, 64, 2, 1, 1}};
constexpr WgmmaTiles kWgmmaCross[] = {{16, 16, 16, 0, 4, 5}, {64, 16, 16, 1, 5, 5}, {128, 16, 16, 2, 2, 2},
                                      {16, 64, 64, 0, 2, 2}, {64, 64, 64, 1, 2, 2}, {128, 64, 64, 2, 1, 1}};

// layer_dots and layer_squares: up to 8 rows per block, or 4; runs of each on their way at once, and blocks that a
// multiprocessor is to hold: measured. For compute capability 10.0 the compiler takes more than three blocks leave.
constexpr int kRowThreads = 256, kRowsTogether = 8, kFewRows = 4;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kNarrowBlocks = 2;
#else
constexpr int kNarrowBlocks = 3;
#endif
constexpr int row_steps(int bytes, int rows) { return rows == kFewRows || bytes == 4 ? 2 : 1; }
constexpr int row_blocks(int bytes, int rows) {
  return bytes == 8 ? 2 : rows == kFewRows ? 4 : bytes == 4 ? 2 : kNarrowBlocks;
}
constexpr bool rows_fit(int bytes, int rows) {  // float64 and float32 sums; runs of the rows and of the step
  const int numbers = (bytes == 8 ? 4 : 3) * rows + 4 * row_steps(bytes, rows) * (rows + 1);
  return numbers + 12 <= registers_for(kRowThreads, row_blocks(bytes, rows));
}
static_assert(whole_warps(kRowThreads) && rows_fit(8, kRowsTogether) && rows_fit(4, kRowsTogether));
static_assert(rows_fit(2, kRowsTogether) && rows_fit(8, kFewRows) && rows_fit(4, kFewRows) && rows_fit(2, kFewRows));

// layer_combine: rows loaded together, which are 32 registers, beside up to 16 of sums.
constexpr int kCombineThreads = 256, kCombineRows = 8;
// puc_combine: the same, with their bits and weights, and two sums; measured, as are the blocks.
constexpr int kMeanThreads = 128, kMeanRows = 4;
constexpr int mean_blocks(int bytes) { return bytes == 2 ? 6 : 7; }
static_assert(whole_warps(kCombineThreads) && whole_warps(kMeanThreads));
static_assert(registers_for(kMeanThreads, mean_blocks(2)) >= 80 && registers_for(kMeanThreads, mean_blocks(4)) >= 72);

// puc_track: a warp has pairs of neighbouring spans, a run per lane; pairs on their way at once, where a chunk is of
// one layer; and blocks: measured.
constexpr int kTrackThreads = 256, kTrackSpans = 2;
constexpr int track_steps(int bytes) { return bytes == 2 ? 1 : 2; }
constexpr int track_blocks(int count_bytes) { return count_bytes == 4 ? 4 : 5; }
static_assert(whole_warps(kTrackThreads) && registers_for(kTrackThreads, track_blocks(4)) >= 64);

// trimmed_mean: a thread sorts the bytes of neighbouring columns whose rows fit its registers; more rows are sorted in
// shared memory, as many as it has room for.
constexpr int kTrimFewThreads = 128, kTrimThreads = 256;
using TrimSizes = Sizes<4, 10, 16, 24, 32, 40, 64, 100, 128>;
using WideTrimSizes = Sizes<10, 16, 32, 48>;  // of float64
constexpr int trim_bytes(int bytes, int rows) { return bytes == 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 8 : 4; }
static_assert(whole_warps(kTrimFewThreads) && whole_warps(kTrimThreads));
static_assert(16 * trim_bytes(4, 16) / 4 <= 64 && 32 * trim_bytes(4, 32) / 4 <= 64 && 48 * 8 / 4 <= 96);

// project_conflicts: a warp per row, whose products lie in shared memory up to so many rows: 16 KB, four blocks.
constexpr int kProjectThreads = 256, kProjectBlocks = 4;
constexpr std::int64_t kProjectRows = 256;
static_assert(whole_warps(kProjectThreads) && kProjectThreads / kWarp * kProjectRows * 8 * kProjectBlocks <= 64 << 10);

// min_norm and common_descent: a block per matrix, whose threads sweep (k + 1)^2 numbers; few rows do with fewer. 125
// registers.
constexpr int kSearchThreads = 512, kFewSearchThreads = 128, kFewSearchRows = 64;
static_assert(whole_warps(kSearchThreads) && registers_for(kSearchThreads, 1) >= 125);

}  // namespace fl_lightning::cuda
