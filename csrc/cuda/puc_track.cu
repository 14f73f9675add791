// SPDX-License-Identifier: Apache-2.0
#include "kernels/partials.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "puc_track";
constexpr int kThreads = 256, kWarps = kThreads / kWarp, kTogether = 2;  // spans that a warp works on at once
constexpr int kWords = (1 << kLargestShift) / 32;
template <class T>
constexpr int kSpan = kWarp * kRun<T>;  // columns of a warp, a run per lane
template <class T>
constexpr int kLanes = 32 / kRun<T>;  // that have the columns of one keep word

// One block per chunk. A lane's runs begin at multiples of their size within the chunk, whatever the addresses: norms
// have the same bits wherever the row lies. A keep word may belong to several layers: the block takes its layers one
// after the other and puts their bits together in shared memory.
template <class T, class Count>
__global__ void __launch_bounds__(kThreads)
    track(const T* row, Count* counts, std::int64_t threshold, std::int32_t participations,
          const __grid_constant__ LayerTable table, std::int64_t columns, std::int32_t* keep, double* partial) {
  using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const std::int64_t chunk = blockIdx.x, start = chunk << table.shift, left = columns - start;
  const int size = static_cast<int>(left < (1 << table.shift) ? left : 1 << table.shift);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int width = vector_width(row, 0, start), count_width = vector_width<Count>(counts, 0, start);
  SHARED(unsigned, words, kWords);
  SHARED(double, sums, kWarps);
  for (int w = threadIdx.x; w * 32 < size; w += kThreads) words[w] = 0;
  __syncthreads();

  std::int64_t layer = table.last_at_most(start, [&](std::int64_t l) { return table.offset(l); });
  for (; layer < table.count && table.offset(layer) < start + size; ++layer) {
    const std::int64_t begin = table.offset(layer) - start, end = table.offset(layer + 1) - start;
    const int from = begin > 0 ? static_cast<int>(begin) : 0, to = end < size ? static_cast<int>(end) : size;
    if (from >= to) continue;
    double total = 0.0;
    for (int span = from / kSpan<T> + warp * kTogether; span * kSpan<T> < to; span += kWarps * kTogether) {
      Run<T> x[kTogether][1];
      Count past[kTogether][kRun<T>];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const std::int64_t column = start + (span + k) * kSpan<T> + lane * kRun<T>;
        load_runs(row, 0, 1, column, start + from, start + to, width, x[k]);
        load_run(static_cast<const Count*>(counts), column, start + from, start + to, count_width, past[k]);
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int first = (span + k) * kSpan<T> + lane * kRun<T>;
        unsigned bits = 0;
        Count now[kRun<T>];
#pragma unroll
        for (int v = 0; v < kRun<T>; ++v) {
          const Real value = x[k][0].template get<Real>(v);
          const std::int32_t before = past[k][v];
          const bool inside = first + v >= from && first + v < to, increase = value <= 0;
          const bool kept = inside && (increase ? before : participations - before) >= threshold;
          now[v] = static_cast<Count>(before + (increase ? 1 : 0));
          if (kept) total += static_cast<double>(value) * static_cast<double>(value);
          bits |= (kept ? 1u : 0u) << v;
        }
        store_run(now, start + first, start + from, start + to, count_width, counts);
        bits <<= lane % kLanes<T> * kRun<T>;
        for (int mask = 1; mask < kLanes<T>; mask *= 2) bits |= __shfl_xor_sync(kFullWarp, bits, mask);
        if (lane % kLanes<T> == 0 && first < to) words[first / 32] |= bits;
      }
    }
    total = warp_sum(total);
    if (lane == 0) sums[warp] = total;
    __syncthreads();
    if (threadIdx.x == 0) {
      double sum = 0.0;
      for (int w = 0; w < kWarps; ++w) sum += sums[w];
      partial[chunk + layer] = sum;
    }
    __syncthreads();
  }
  for (int w = threadIdx.x; w * 32 < size; w += kThreads) {
    keep[start / 32 + w] = static_cast<std::int32_t>(static_cast<unsigned>(words[w]));
  }
}

// One warp per layer.
__global__ void __launch_bounds__(kSumThreads, 8)
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
  with_type(row.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto run = [&](auto* own) {
      using Count = std::remove_pointer_t<decltype(own)>;
      launch(kOp, track<T, Count>, chunks, kThreads, context, static_cast<const T*>(row.data), own, threshold,
             static_cast<std::int32_t>(participations), table, row.columns, keep, partial);
    };
    if (type == CountType::u8) return run(static_cast<std::uint8_t*>(counts));
    if (type == CountType::i16) return run(static_cast<std::int16_t*>(counts));
    return run(static_cast<std::int32_t*>(counts));
  });
  constexpr int kLayers = kSumThreads / kWarp;
  launch(kOp, sum_norms, (table.count + kLayers - 1) / kLayers, kSumThreads, context, partial, table, norms);
}

}  // namespace fl_lightning::cuda
