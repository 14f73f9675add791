// SPDX-License-Identifier: Apache-2.0
// FedHEAL's pass over one client's update. Included once per instruction set by every_isa.h.
namespace fl_lightning::cpu::FL_ISA {

template <class T>
FL_INLINE std::uint32_t increases(const T* x) {
  std::uint32_t bits = 0;
#pragma GCC unroll 8
  for (int i = 0; i < 32; i += kFloats) bits |= not_positive(load(x + i)) << i;
  return bits;
}
FL_INLINE std::uint32_t increases(const double* x) {
  std::uint32_t bits = 0;
#pragma GCC unroll 16
  for (int i = 0; i < 32; i += kDoubles) bits |= not_positive(load(x + i)) << i;
  return bits;
}

// One coordinate at the edge of a layer; returns its part of the squared norm.
template <class T, class Count>
FL_INLINE double track_one(const PucTrack& p, std::int64_t column) {
  const double x = widened(static_cast<const T*>(p.row)[column]);
  Count& count = static_cast<Count*>(p.counts)[column];
  const bool increase = x <= 0;
  const bool kept = increase ? count >= p.low : count <= p.high;
  count = static_cast<Count>(count + increase);
  const std::int64_t bit = column % 32;
  // Columns come in order, so the first of a word starts it.
  if (bit == 0) p.keep[column / 32] = 0;
  const auto word = static_cast<std::uint32_t>(p.keep[column / 32]);
  p.keep[column / 32] = static_cast<std::int32_t>(word | static_cast<std::uint32_t>(kept) << bit);
  return kept ? x * x : 0;
}

template <class T, class Count>
void track_as(const PucTrack& p, std::int64_t begin, std::int64_t end, double* norm) {
  const T* x = static_cast<const T*>(p.row);
  Count* counts = static_cast<Count*>(p.counts);
  // Bounds outside the counts' range keep all or nothing.
  constexpr std::int64_t least = sizeof(Count) == 1 ? 0 : sizeof(Count) == 2 ? -0x8000 : -0x80000000ll;
  constexpr std::int64_t most = sizeof(Count) == 1 ? 0xff : sizeof(Count) == 2 ? 0x7fff : 0x7fffffffll;
  const std::uint32_t some_low = p.low > most ? 0u : ~0u, some_high = p.high < least ? 0u : ~0u;
  const Count low = static_cast<Count>(p.low < least ? least : p.low > most ? most : p.low);
  const Count high = static_cast<Count>(p.high < least ? least : p.high > most ? most : p.high);

  double edges = 0;
  for (; begin < end && begin % 32 != 0; ++begin) edges += track_one<T, Count>(p, begin);
  constexpr int accumulators = 4;
  Doubles total[accumulators];
#pragma GCC unroll 4
  for (int i = 0; i < accumulators; ++i) set_zero(total[i]);
  for (; begin + 32 <= end; begin += 32) {
    for (std::int64_t i = 0; i < 32; i += 64 / static_cast<std::int64_t>(sizeof(T))) {
      prefetch_at(x + begin + i, kRowAhead);
    }
    prefetch_at(counts + begin, kCountsAhead);
    const std::uint32_t up = increases(x + begin);
    const Compared past = compare(counts + begin, low, high);
    const std::uint32_t kept = (up & past.at_least & some_low) | (~up & past.at_most & some_high);
    increment(counts + begin, up);
    p.keep[begin / 32] = static_cast<std::int32_t>(kept);
#pragma GCC unroll 16
    for (int i = 0; i < 32 / kDoubles; ++i) {
      const Doubles value = widen(x + begin + i * kDoubles);
      total[i % accumulators] =
          masked_multiply_add(mask(kept >> (i * kDoubles)), value, value, total[i % accumulators]);
    }
  }
  for (; begin < end; ++begin) edges += track_one<T, Count>(p, begin);
  *norm = sum(add(add(total[0], total[1]), add(total[2], total[3]))) + edges;
}

template <class T>
void track_counts(const PucTrack& p, std::int64_t begin, std::int64_t end, double* norm) {
  switch (p.type) {
    case CountType::u8:
      return track_as<T, std::uint8_t>(p, begin, end, norm);
    case CountType::i16:
      return track_as<T, std::int16_t>(p, begin, end, norm);
    case CountType::i32:
      return track_as<T, std::int32_t>(p, begin, end, norm);
  }
}

inline void track(const PucTrack& p, std::int64_t begin, std::int64_t end, double* norm) {
  FL_BY_DTYPE(p.dtype, track_counts, (p, begin, end, norm));
}

}  // namespace fl_lightning::cpu::FL_ISA
