// SPDX-License-Identifier: Apache-2.0
// Weighted mean of the kept coordinates. Included once per instruction set by every_isa.h.
//
// Both sums run in float64, in the order of the rows for every column.
namespace fl_lightning::cpu::FL_ISA {

inline constexpr std::int64_t kStep = kMeanSums * kDoubles;
static_assert(32 % kStep == 0, "a step takes its bits from one word");

template <class T>
FL_INLINE void mean_one(const PucCombine& p, std::int64_t words, std::int64_t column) {
  const T* x = static_cast<const T*>(p.rows.data) + column;
  double total = 0, mass = 0;
  for (std::int64_t r = 0; r < p.rows.rows; ++r) {
    if (static_cast<std::uint32_t>(p.keep[r * words + column / 32]) >> (column % 32) & 1u) {
      total = multiply_add(widened(x[r * p.rows.stride]), p.weights[r], total);
      mass += p.weights[r];
    }
  }
  narrow(mass == 0 ? 0.0 : total / mass, static_cast<T*>(p.out) + column);
}

template <class T>
void means(const PucCombine& p, std::int64_t begin, std::int64_t end, double* sums) {
  const std::int64_t m = p.rows.rows, words = (p.rows.columns + 31) / 32, stride = p.rows.stride;
  T* out = static_cast<T*>(p.out);
  const bool stream = p.stream && reinterpret_cast<std::uintptr_t>(out + begin) % 64 == 0;
  const std::int64_t whole = begin + (end - begin) / kStep * kStep;
  for (std::int64_t r0 = 0; r0 < m; r0 += kMeanRows) {
    const std::int64_t r1 = m - r0 < kMeanRows ? m : r0 + kMeanRows;
    double* waiting = sums;
    for (std::int64_t c = begin; c < whole; c += kStep, waiting += 2 * kStep) {
      Doubles total[kMeanSums], mass[kMeanSums];
#pragma GCC unroll 4
      for (int i = 0; i < kMeanSums; ++i) {
        if (r0 == 0) {
          set_zero(total[i]);
          set_zero(mass[i]);
        } else {
          total[i] = load(waiting + i * kDoubles);
          mass[i] = load(waiting + kStep + i * kDoubles);
        }
      }
      const T* x = static_cast<const T*>(p.rows.data) + r0 * stride + c;
      const std::int32_t* keep = p.keep + r0 * words + c / 32;
      for (std::int64_t r = r0; r < r1; ++r, x += stride, keep += words) {
        const Doubles weight = broadcast(p.weights[r]);
        __builtin_prefetch(keep + 32);
        const std::uint32_t bits = static_cast<std::uint32_t>(*keep) >> (c % 32);
#pragma GCC unroll 4
        for (int i = 0; i < kMeanSums; ++i) {
          if (i * kDoubles * sizeof(T) % 64 == 0) prefetch(x + i * kDoubles);
          const Mask chosen = mask(bits >> (i * kDoubles));
          total[i] = masked_multiply_add(chosen, widen(x + i * kDoubles), weight, total[i]);
          mass[i] = masked_add(chosen, mass[i], weight);
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < kMeanSums; ++i) {
        if (r1 == m) {
          write(out + c + i * kDoubles, quotient(total[i], mass[i]), stream);
        } else {
          store(waiting + i * kDoubles, total[i]);
          store(waiting + kStep + i * kDoubles, mass[i]);
        }
      }
    }
  }
  for (std::int64_t c = whole; c < end; ++c) mean_one<T>(p, words, c);
  if (stream) fence();
}

inline void kept_means(const PucCombine& p, std::int64_t begin, std::int64_t end, double* sums) {
  FL_BY_DTYPE(p.rows.dtype, means, (p, begin, end, sums));
}

}  // namespace fl_lightning::cpu::FL_ISA
