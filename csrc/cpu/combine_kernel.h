// SPDX-License-Identifier: Apache-2.0
// Linear combination of the rows over part of one layer. Included once per instruction set by every_isa.h.
//
// Sums run in float64, in the order of the rows for every column, so a column's result does not depend on where it
// lies.
namespace fl_lightning::cpu::FL_ISA {

inline constexpr int kSums = 8;  // vectors in flight
inline constexpr std::int64_t kStep = kSums * kDoubles;

// One column.
template <class T>
FL_INLINE void combine_one(const T* x, std::int64_t stride, std::int64_t rows, const double* coeff, T* out, bool add) {
  double total = 0;
  for (std::int64_t r = 0; r < rows; ++r) total = multiply_add(widened(x[r * stride]), coeff[r], total);
  narrow(add ? total + widened(*out) : total, out);
}

// `columns`, a multiple of kStep, for some rows; between sweeps the sums wait in memory.
template <class T>
void sweep(const T* x, std::int64_t stride, std::int64_t rows, const double* coeff, double* sums, bool first, bool last,
           T* out, bool add_out, bool stream, std::int64_t columns) {
  for (std::int64_t c = 0; c < columns; c += kStep) {
    Doubles total[kSums];
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) {
      if (first) {
        set_zero(total[i]);
      } else {
        total[i] = load(sums + c + i * kDoubles);
      }
    }
    const T* row = x + c;
    for (std::int64_t r = 0; r < rows; ++r, row += stride) {
      const Doubles factor = broadcast(coeff[r]);
#pragma GCC unroll 8
      for (int i = 0; i < kSums; ++i) {
        if (i * kDoubles * sizeof(T) % 64 == 0) prefetch(row + i * kDoubles);
        total[i] = multiply_add(widen(row + i * kDoubles), factor, total[i]);
      }
    }
    if (!last) {
#pragma GCC unroll 8
      for (int i = 0; i < kSums; ++i) store(sums + c + i * kDoubles, total[i]);
      continue;
    }
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) {
      T* to = out + c + i * kDoubles;
      write(to, add_out ? add(total[i], widen(to)) : total[i], stream);
    }
  }
}

template <class T>
void combine_as(const Combine& p, const double* coeff, std::int64_t begin, std::int64_t end, double* sums) {
  const T* x = static_cast<const T*>(p.rows.data);
  T* out = static_cast<T*>(p.out);
  const std::int64_t m = p.rows.rows, stride = p.rows.stride;
  // Lines of the output are written whole.
  for (; begin < end && reinterpret_cast<std::uintptr_t>(out + begin) % 64 != 0; ++begin) {
    combine_one(x + begin, stride, m, coeff, out + begin, p.add);
  }
  const std::int64_t whole = begin + (end - begin) / kStep * kStep;
  for (std::int64_t columns; begin < whole; begin += columns) {
    columns = whole - begin < kBlockColumns ? whole - begin : kBlockColumns;
    for (std::int64_t r = 0; r < m; r += kSweepRows) {
      const std::int64_t rows = m - r < kSweepRows ? m - r : kSweepRows;
      sweep(x + r * stride + begin, stride, rows, coeff + r, sums, r == 0, r + rows == m, out + begin, p.add, p.stream,
            columns);
    }
  }
  for (; begin < end; ++begin) combine_one(x + begin, stride, m, coeff, out + begin, p.add);
}

inline void combine(const Combine& p, const double* coeff, std::int64_t begin, std::int64_t end, double* sums) {
  FL_BY_DTYPE(p.rows.dtype, combine_as, (p, coeff, begin, end, sums));
  if (p.stream) fence();
}

}  // namespace fl_lightning::cpu::FL_ISA
