// SPDX-License-Identifier: Apache-2.0
// Packed: a symmetric matrix of float64 numbers, of which one half is stored. Part of min_norm_kernel.h.
namespace fl_lightning::cpu::FL_ISA {

// Rows come in blocks of kDoubles, one row per lane. A block holds its columns from its own rows on, each as one
// vector: a column of the matrix is read by vectors as far as the diagonal, and an update by an outer product runs
// through memory once, in order. The square on the diagonal is stored whole.
struct Packed {
  double* data;
  std::int64_t n;  // rows, a multiple of kDoubles; the caller keeps those that fill up at zero

  // The lanes of column j in the block that begins with row `first`, j >= first.
  double* at(std::int64_t first, std::int64_t j) const {
    return data + first * n - first * (first - kDoubles) / 2 + (j - first) * kDoubles;
  }
  static std::int64_t size(std::int64_t n) { return n * (n + kDoubles) / 2; }
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
      for (std::int64_t j = i; j < n; j += kDoubles, to += kDoubles * kDoubles) {
#pragma GCC unroll 8
        for (int c = 0; c < kDoubles; ++c) {
          double* lanes = to + c * kDoubles;
          store(lanes, multiply_add(rows, broadcast(right[j + c]), load(lanes)));
        }
      }
    }
  }

  // out = this x; sums is scratch, kDoubles numbers for each row.
  void multiply(const double* x, double* out, double* sums) const {
    const double* from = data;
    for (std::int64_t i = 0; i < n; i += kDoubles) {
      const Doubles rows = load(x + i);
      Doubles even = broadcast(0.0), odd = even;
      for (std::int64_t j = i; j < n; j += 2, from += 2 * kDoubles) {
        const Doubles one = load(from), two = load(from + kDoubles);
        even = multiply_add(one, broadcast(x[j]), even);
        odd = multiply_add(two, broadcast(x[j + 1]), odd);
        if (j < i + kDoubles) continue;
        // What the other half of the matrix adds to out[j], still to be added up over the lanes.
        double* sum = sums + j * kDoubles;
        store(sum, i == 0 ? one * rows : multiply_add(one, rows, load(sum)));
        store(sum + kDoubles, i == 0 ? two * rows : multiply_add(two, rows, load(sum + kDoubles)));
      }
      store(out + i, add(even, odd));
    }
    for (std::int64_t i = kDoubles; i < n; ++i) out[i] += sum(load(sums + i * kDoubles));
  }
};

FL_INLINE double dot(const double* a, const double* b, std::int64_t n) {
  Doubles total = broadcast(0.0);
  for (std::int64_t i = 0; i < n; i += kDoubles) total = multiply_add(load(a + i), load(b + i), total);
  return sum(total);
}

FL_INLINE double sum_of(const double* a, std::int64_t n) {
  Doubles total = broadcast(0.0);
  for (std::int64_t i = 0; i < n; i += kDoubles) total = add(total, load(a + i));
  return sum(total);
}

// Takes numbers, vector by vector, and tells the smallest and where it stands first. NaN counts as infinity.
class Minimum {
 public:
  explicit FL_INLINE Minimum(double* room) : numbers_(room), low_(broadcast(__builtin_inf())) {}

  FL_INLINE void put(std::int64_t i, Doubles x) {
    store(numbers_ + i, x);
    low_ = x < low_ ? x : low_;
  }

  FL_INLINE double value() const {
    double lanes[kDoubles], value = __builtin_inf();
    store(lanes, low_);
    for (int i = 0; i < kDoubles; ++i) value = lanes[i] < value ? lanes[i] : value;
    return value;
  }

  // Of a value below infinity.
  FL_INLINE std::int64_t index(double value) const {
    for (std::int64_t i = 0;; i += kDoubles) {
      const Doubles above = load(numbers_ + i) <= broadcast(value) ? broadcast(0.0) : broadcast(1.0);
      const std::uint32_t bits = not_positive(above);
      if (bits != 0) return i + __builtin_ctz(bits);
    }
  }

 private:
  double* numbers_;
  Doubles low_;
};

}  // namespace fl_lightning::cpu::FL_ISA
