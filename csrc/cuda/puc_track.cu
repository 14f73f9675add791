// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/partials.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "puc_track";
constexpr int kWarps = kTrackThreads / kWarp;
template <class T>
constexpr int kSpan = kWarp * kRun<T>;  // columns of a warp, a run per lane
template <class T>
constexpr int kLanes = 32 / kRun<T>;  // that have the columns of one keep word

struct Bounds {
  std::int32_t threshold, participations;
};

// Keep bits of a run in the lowest bits, and its counts; adds the squares of what is kept.
template <class T, class Count>
__device__ inline unsigned track_run(const Run<T>& x, const Bounds& bounds, Count (&counts)[kRun<T>], double& total) {
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
  unsigned bits = 0;
#pragma unroll
  for (int v = 0; v < kRun<T>; ++v) {
    const Real value = x.template get<Real>(v);
    const std::int32_t before = counts[v];
    const bool increase = value <= 0;
    const bool kept = (increase ? before : bounds.participations - before) >= bounds.threshold;
    counts[v] = static_cast<Count>(before + (increase ? 1 : 0));
    const double part = static_cast<double>(kept ? value : Real{0});
    total += part * part;
    bits |= (kept ? 1u : 0u) << v;
  }
  return bits;
}

// The keep word that the runs of kLanes lanes make, in all of them.
template <class T>
__device__ inline unsigned keep_word(unsigned bits, int lane) {
  bits <<= lane % kLanes<T> * kRun<T>;
  for (int mask = 1; mask < kLanes<T>; mask *= 2) bits |= __shfl_xor_sync(kFullWarp, bits, mask);
  return bits;
}

// Of a chunk that is whole and whose vectors are aligned, what a thread has on its way at once: the runs of a pair of
// spans, and of the warp's next pairs.
template <class T, class Count>
struct Columns {
  static constexpr int kSpans = kTrackSpans * track_steps(sizeof(T));
  Run<T> x[kSpans];
  Count counts[kSpans][kRun<T>];

  __device__ static int place(int span, int k) {
    return (span + k / kTrackSpans * kWarps * kTrackSpans + k % kTrackSpans) * kSpan<T> + threadIdx.x % kWarp * kRun<T>;
  }
  __device__ void load(const T* row, const Count* from, int span, int size) {
#pragma unroll
    for (int k = 0; k < kSpans; ++k) {
      const int first = place(span, k);
      if (first >= size) break;
      x[k].template load<16>(row + first);
      load_vectors<16>(from + first, counts[k]);
    }
  }
  __device__ void track(const Bounds& bounds, int span, int size, Count* to, std::int32_t* keep, double& total) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int k = 0; k < kSpans; ++k) {
      const int first = place(span, k);
      if (first >= size) break;
      const unsigned word = keep_word<T>(track_run(x[k], bounds, counts[k], total), lane);
      store_streamed<16>(counts[k], to + first);
      if (lane % kLanes<T> == 0) keep[first / 32] = static_cast<std::int32_t>(word);
    }
  }
};

// The part [from, to) of a chunk, which belongs to one layer: run by run, in the order of Columns.
template <class T, class Count, class Words>
__device__ inline double track_part(const T* row, Count* counts, const Bounds& bounds, int from, int to, Words words) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int width = vector_width(row, 0, 0), count_width = vector_width<Count>(counts, 0, 0);
  double total = 0.0;
  for (int span = from / kSpan<T> + warp * kTrackSpans; span * kSpan<T> < to; span += kWarps * kTrackSpans) {
#pragma unroll 1
    for (int k = 0; k < kTrackSpans; ++k) {
      const int first = (span + k) * kSpan<T> + lane * kRun<T>;
      Run<T> x[1];
      Count own[kRun<T>];
      load_runs(row, 0, 1, first, from, to, width, x);
      load_run(static_cast<const Count*>(counts), first, from, to, count_width, own);
      unsigned bits = track_run(x[0], bounds, own, total);
      store_run(own, first, from, to, count_width, counts);
#pragma unroll
      for (int v = 0; v < kRun<T>; ++v) bits &= first + v < from || first + v >= to ? ~(1u << v) : ~0u;
      bits = keep_word<T>(bits, lane);
      if (lane % kLanes<T> == 0 && first < to) words[first / 32] |= bits;
    }
  }
  return total;
}

// One block per chunk. A lane's runs begin at multiples of their size within the chunk, whatever the addresses: norms
// have the same bits wherever the row lies. A keep word may belong to several layers: the block takes its layers one
// after the other and puts their bits together in shared memory.
template <class T, class Count>
__global__ void __launch_bounds__(kTrackThreads, track_blocks(sizeof(Count)))
    track(const T* row, Count* counts, const Bounds bounds, const __grid_constant__ LayerTable table,
          std::int64_t columns, std::int32_t* keep, double* partial) {
  const std::int64_t chunk = blockIdx.x, start = chunk << table.shift, left = columns - start;
  const int size = static_cast<int>(left < (1 << table.shift) ? left : 1 << table.shift);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  SHARED(unsigned, words, (1 << kLargestShift) / 32);
  SHARED(double, sums, kWarps);
  const auto leave = [&](double total, std::int64_t layer) {
    total = warp_sum(total);
    if (lane == 0) sums[warp] = total;
    __syncthreads();
    if (threadIdx.x == 0) {
      double sum = 0.0;
      for (int w = 0; w < kWarps; ++w) sum += sums[w];
      partial[chunk + layer] = sum;
    }
  };

  constexpr int kCountBytes = kRun<T> * sizeof(Count) < 16 ? kRun<T> * sizeof(Count) : 16;
  const bool whole = size == 1 << table.shift && vector_width(row, 0, start) == 16 &&
                     vector_width<Count>(counts, 0, start) >= kCountBytes;
  int span = warp * kTrackSpans;
  Columns<T, Count> own;
  if (whole) own.load(row + start, counts + start, span, size);  // on their way while the block looks for its layer
  std::int64_t layer = table.last_at_most(start, [&](std::int64_t l) { return table.offset(l); });
  if (whole && table.offset(layer + 1) >= start + size) {
    double total = 0.0;
    while (true) {
      own.track(bounds, span, size, counts + start, keep + start / 32, total);
      span += kWarps * Columns<T, Count>::kSpans;
      if (span * kSpan<T> >= size) break;
      own.load(row + start, counts + start, span, size);
    }
    return leave(total, layer);
  }
  for (int w = threadIdx.x; w * 32 < size; w += kTrackThreads) words[w] = 0;
  __syncthreads();
  for (; layer < table.count && table.offset(layer) < start + size; ++layer) {
    const std::int64_t begin = table.offset(layer) - start, end = table.offset(layer + 1) - start;
    const int from = begin > 0 ? static_cast<int>(begin) : 0, to = end < size ? static_cast<int>(end) : size;
    if (from >= to) continue;
    leave(track_part(row + start, counts + start, bounds, from, to, +words), layer);
    __syncthreads();
  }
  for (int w = threadIdx.x; w * 32 < size; w += kTrackThreads) {
    keep[start / 32 + w] = static_cast<std::int32_t>(static_cast<unsigned>(words[w]));
  }
}

// One warp per layer.
__global__ void __launch_bounds__(kSumThreads, kSumBlocks)
    sum_norms(const double* partial, const __grid_constant__ LayerTable table, double* norms) {
  const std::int64_t layer = std::int64_t{blockIdx.x} * (kSumThreads / kWarp) + threadIdx.x / kWarp;
  if (layer >= table.count) return;
  const double sum = layer_sum(table, layer, [&](std::int64_t item) { return partial[item]; });
  if (threadIdx.x % kWarp == 0) norms[layer] = sum;
}

}  // namespace

void puc_track(Matrix row, void* counts, CountType type, std::int64_t threshold, std::int64_t participations,
               Layers layers, std::int32_t* keep, double* norms, Context context) {
  const LayerTable table = make_table(kOp, layers, chunk_shift(layers), context);
  const std::int64_t chunks = (row.columns + (std::int64_t{1} << table.shift) - 1) >> table.shift;
  double* partial = scratch<double>(context, item_count(table, row.columns));
  constexpr std::int64_t kMost = INT32_MAX;
  const Bounds bounds = {static_cast<std::int32_t>(std::clamp(threshold, -kMost, kMost)),
                         static_cast<std::int32_t>(participations)};
  with_type(row.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto run = [&](auto* own) {
      using Count = std::remove_pointer_t<decltype(own)>;
      launch(kOp, track<T, Count>, chunks, kTrackThreads, context, static_cast<const T*>(row.data), own, bounds, table,
             row.columns, keep, partial);
    };
    if (type == CountType::u8) return run(static_cast<std::uint8_t*>(counts));
    if (type == CountType::i16) return run(static_cast<std::int16_t*>(counts));
    return run(static_cast<std::int32_t*>(counts));
  });
  constexpr int kLayers = kSumThreads / kWarp;
  launch(kOp, sum_norms, (table.count + kLayers - 1) / kLayers, kSumThreads, context, partial, table, norms);
}

}  // namespace fl_lightning::cuda
