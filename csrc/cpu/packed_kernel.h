// SPDX-License-Identifier: Apache-2.0
// Symmetric matrices of float64 numbers, one half stored. Included once per instruction set by min_norm_kernel.h.
namespace fl_lightning::cpu::FL_ISA {

// Rows come in blocks of kDoubles, one row per lane. A block holds its columns from its own rows on, each as one vector:
// a column of the matrix is read by vectors as far as the diagonal, and an update by an outer product runs through
// memory once, in order. The square on the diagonal is stored whole.
struct Packed {
  double* data;
  std::int64_t n;  // rows, a multiple of kDoubles; the caller keeps those that fill up at zero

  // The lanes of column j in the block that begins with row `first`, j >= first.
  double* at(std::int64_t first, std::int64_t j) const {
    return data + first * n - first * (first - kDoubles) / 2 + (j - first) * kDoubles;
  }
  static std::int64_t begin(std::int64_t row) { return row / kDoubles * kDoubles; }
  double& diagonal(std::int64_t i) const { return at(begin(i), i)[i - begin(i)]; }

  void column(std::int64_t p, double* out) const {
    const std::int64_t own = begin(p);
    for (std::int64_t i = 0; i <= own; i += kDoubles) store(out + i, load(at(i, p)));
    const double* lane = at(own, own) + (p - own);
    for (std::int64_t j = own + kDoubles; j < n; ++j) out[j] = lane[(j - own) * kDoubles];
  }

  void set_column(std::int64_t p, const double* values) const {
    const std::int64_t own = begin(p);
    for (std::int64_t i = 0; i <= own; i += kDoubles) store(at(i, p), load(values + i));
    double* lane = at(own, own) + (p - own);
    for (std::int64_t j = own; j < n; ++j) lane[(j - own) * kDoubles] = values[j];
  }

  // Adds left right'.
  void add_outer(const double* left, const double* right) const {
    double* to = data;
    for (std::int64_t i = 0; i < n; i += kDoubles) {
      const Doubles rows = load(left + i);
#pragma GCC unroll 8
      for (std::int64_t j = i; j < n; ++j, to += kDoubles) {
        store(to, multiply_add(rows, broadcast(right[j]), load(to)));
      }
    }
  }

  // out = this x; sums holds kDoubles numbers for each row.
  void multiply(const double* x, double* out, double* sums) const {
    for (std::int64_t e = 0; e < n * kDoubles; ++e) sums[e] = 0.0;
    const double* from = data;
    for (std::int64_t i = 0; i < n; i += kDoubles) {
      const Doubles rows = load(x + i);
      Doubles total[2];
      set_zero(total[0]);
      set_zero(total[1]);
      for (std::int64_t j = i; j < i + kDoubles; ++j, from += kDoubles) {
        total[j % 2] = multiply_add(load(from), broadcast(x[j]), total[j % 2]);
      }
      for (std::int64_t j = i + kDoubles; j < n; j += 2, from += 2 * kDoubles) {
#pragma GCC unroll 2
        for (int s = 0; s < 2; ++s) {
          const Doubles own = load(from + s * kDoubles);
          double* sum = sums + (j + s) * kDoubles;
          total[s] = multiply_add(own, broadcast(x[j + s]), total[s]);
          store(sum, multiply_add(own, rows, load(sum)));
        }
      }
      store(out + i, add(total[0], total[1]));
    }
    for (std::int64_t i = 0; i < n; ++i) out[i] += sum(load(sums + i * kDoubles));
  }
};

FL_INLINE double dot(const double* a, const double* b, std::int64_t n) {
  Doubles total;
  set_zero(total);
  for (std::int64_t i = 0; i < n; i += kDoubles) total = multiply_add(load(a + i), load(b + i), total);
  return sum(total);
}

struct Best {
  double value;
  std::int64_t index;
};

// The smallest number and where it stands first; infinity where there is nothing but NaN.
inline Best least(const double* x, std::int64_t n) {
  Doubles low = load(x);
  for (std::int64_t i = kDoubles; i < n; i += kDoubles) low = minimum(low, load(x + i));
  double lanes[kDoubles];
  store(lanes, low);
  double value = lanes[0];
  for (int i = 1; i < kDoubles; ++i) value = lanes[i] < value ? lanes[i] : value;
  for (std::int64_t i = 0; i < n; ++i) {
    if (x[i] == value) return {value, i};
  }
  return {__builtin_inf(), 0};
}

}  // namespace fl_lightning::cpu::FL_ISA
