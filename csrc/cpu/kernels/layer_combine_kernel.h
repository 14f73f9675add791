// SPDX-License-Identifier: Apache-2.0
// Linear combination of the rows over part of one layer. Included once per instruction set by every_isa.h.
//
// Sums run in float64, in the order of the rows for every column, so a column's result does not depend on where it
// lies.
namespace fl_lightning::cpu::FL_ISA {

inline constexpr std::int64_t kStep = kCombineSums * kDoubles;

// One column.
template <class T>
FL_INLINE void combine_one(const Terms& terms, std::int64_t column, T* out, bool add) {
  double total = 0;
  for (std::int64_t r = 0; r < terms.count; ++r) {
    total = multiply_add(widened(static_cast<const T*>(terms.rows[r])[column]), terms.coeff[r], total);
  }
  narrow(add ? total + widened(out[column]) : total, out + column);
}

// `columns`, a multiple of kStep, for some rows; between sweeps the sums wait in memory.
template <class T>
void sweep(const Terms& terms, std::int64_t begin, double* sums, bool first, bool last, T* out, bool add_out,
           bool stream, std::int64_t columns) {
  for (std::int64_t c = 0; c < columns; c += kStep) {
    Doubles total[kCombineSums];
#pragma GCC unroll 8
    for (int i = 0; i < kCombineSums; ++i) {
      if (first) {
        set_zero(total[i]);
      } else {
        total[i] = load(sums + c + i * kDoubles);
      }
    }
    for (std::int64_t r = 0; r < terms.count; ++r) {
      const T* row = static_cast<const T*>(terms.rows[r]) + begin + c;
      const Doubles factor = broadcast(terms.coeff[r]);
#pragma GCC unroll 8
      for (int i = 0; i < kCombineSums; ++i) {
        if (i * kDoubles * sizeof(T) % 64 == 0) prefetch(row + i * kDoubles);
        total[i] = multiply_add(widen(row + i * kDoubles), factor, total[i]);
      }
    }
    if (!last) {
#pragma GCC unroll 8
      for (int i = 0; i < kCombineSums; ++i) store(sums + c + i * kDoubles, total[i]);
      continue;
    }
#pragma GCC unroll 8
    for (int i = 0; i < kCombineSums; ++i) {
      T* to = out + begin + c + i * kDoubles;
      write(to, add_out ? add(total[i], widen(to)) : total[i], stream);
    }
  }
}

template <class T>
void combine_as(const Combine& p, const Terms& terms, std::int64_t begin, std::int64_t end, double* sums) {
  T* out = static_cast<T*>(p.out);
  // Lines of the output are written whole.
  for (; begin < end && reinterpret_cast<std::uintptr_t>(out + begin) % 64 != 0; ++begin) {
    combine_one(terms, begin, out, p.add);
  }
  const std::int64_t whole = terms.count == 0 ? begin : begin + (end - begin) / kStep * kStep;
  for (std::int64_t columns; begin < whole; begin += columns) {
    columns = whole - begin < kBlockColumns ? whole - begin : kBlockColumns;
    for (std::int64_t r = 0; r < terms.count; r += kCombineRows) {
      const std::int64_t rows = terms.count - r < kCombineRows ? terms.count - r : kCombineRows;
      sweep({terms.rows + r, terms.coeff + r, rows}, begin, sums, r == 0, r + rows == terms.count, out, p.add, p.stream,
            columns);
    }
  }
  for (; begin < end; ++begin) combine_one(terms, begin, out, p.add);
}

inline void combine(const Combine& p, const Terms& terms, std::int64_t begin, std::int64_t end, double* sums) {
  FL_BY_DTYPE(p.dtype, combine_as, (p, terms, begin, end, sums));
  if (p.stream) fence();
}

}  // namespace fl_lightning::cpu::FL_ISA
