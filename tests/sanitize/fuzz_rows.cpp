// SPDX-License-Identifier: Apache-2.0
// The ops on rows of updates against plain double loops.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "fuzz.h"

namespace fuzz {
namespace {

namespace cpu = fl_lightning::cpu;

double product(const Rows& left, int64_t i, const Rows& right, int64_t j, int64_t begin, int64_t end) {
  double total = 0;
  for (int64_t c = begin; c < end; ++c) total += left.at(i, c) * right.at(j, c);
  return total;
}

// Now and then so many that results are written past the caches.
int64_t any_columns_of_output(int64_t rows, DType dtype) {
  return one_in(1000) ? (int64_t{1} << 25) / size_of(dtype) / (rows + 1) + between(0, 200) : any_columns(rows);
}

DType dtype_beside(DType dtype) { return one_in(2) ? dtype : any_dtype(); }

}  // namespace

int64_t layer_gram() {
  const int64_t m = any_rows(), n = any_columns(m);
  describe("layer_gram", m, n);
  const DType dtype = any_dtype();
  const Values values = any_values(dtype);
  const Rows rows(m, n, dtype, values);
  const Offsets offsets(n);
  Buffer gram(offsets.layers.count * m * m, 8);
  const auto run = [&](ParallelFor parallel) {
    cpu::layer_gram(rows.matrix, offsets.layers, gram.as<double>(), parallel);
  };
  if (values == Values::bits) return same_bits_twice({&gram}, run), 2;
  run(any_parallel());
  for (int64_t l = 0; l < offsets.layers.count; ++l) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        const int64_t at = (l * m + i) * m + j, mirror = (l * m + j) * m + i;
        check("gram", at, gram.as<double>()[at], product(rows, i, rows, j, offsets[l], offsets[l + 1]));
        check("gram", mirror, gram.as<double>()[mirror], gram.as<double>()[at]);
      }
    }
  }
  return 1;
}

int64_t layer_cross_gram() {
  const int64_t m = any_rows(), n = any_columns(m), h = between(0, 8);
  describe("layer_cross_gram", m, n);
  const DType dtype = any_dtype(), other = dtype_beside(dtype);
  const Values values = any_values(dtype), other_values = any_values(other);
  const Rows rows(m, n, dtype, values), others(h, n, other, other_values);
  const Offsets offsets(n);
  Buffer gram(offsets.layers.count * m * h, 8);
  const auto run = [&](ParallelFor parallel) {
    cpu::layer_cross_gram(rows.matrix, others.matrix, offsets.layers, gram.as<double>(), parallel);
  };
  if (values == Values::bits || other_values == Values::bits) return same_bits_twice({&gram}, run), 2;
  run(any_parallel());
  for (int64_t at = 0; at < offsets.layers.count * m * h; ++at) {
    const int64_t j = at % h, i = at / h % m, l = at / h / m;
    check("gram", at, gram.as<double>()[at], product(rows, i, others, j, offsets[l], offsets[l + 1]));
  }
  return 1;
}

int64_t layer_chosen_gram() {
  const int64_t m = any_rows(), n = any_columns(m), h = between(1, 30), count = between(0, 30);
  describe("layer_chosen_gram", m, n);
  const DType dtype = any_dtype(), other = dtype_beside(dtype);
  const Values values = any_values(dtype), other_values = any_values(other);
  const Rows rows(m, n, dtype, values), others(h, n, other, other_values);
  const Offsets offsets(n);
  Buffer gram(offsets.layers.count * m * count, 8), chosen(count, 8);
  for (int64_t j = 0; j < count; ++j) chosen.as<int64_t>()[j] = between(0, h - 1);
  const auto run = [&](ParallelFor parallel) {
    cpu::layer_chosen_gram(rows.matrix, others.matrix, chosen.as<int64_t>(), count, offsets.layers, gram.as<double>(),
                           parallel);
  };
  if (values == Values::bits || other_values == Values::bits) return same_bits_twice({&gram}, run), 2;
  run(any_parallel());
  for (int64_t at = 0; at < offsets.layers.count * m * count; ++at) {
    const int64_t j = chosen.as<int64_t>()[at % count], i = at / count % m, l = at / count / m;
    check("gram", at, gram.as<double>()[at], product(rows, i, others, j, offsets[l], offsets[l + 1]));
  }
  return 1;
}

int64_t layer_squares() {
  const int64_t m = any_rows(), n = any_columns(m);
  describe("layer_squares", m, n);
  const DType dtype = any_dtype();
  const Values values = any_values(dtype);
  const Rows rows(m, n, dtype, values);
  const Offsets offsets(n);
  Buffer squares(offsets.layers.count * m, 8);
  const auto run = [&](ParallelFor parallel) {
    cpu::layer_squares(rows.matrix, offsets.layers, squares.as<double>(), parallel);
  };
  if (values == Values::bits) return same_bits_twice({&squares}, run), 2;
  run(any_parallel());
  for (int64_t l = 0; l < offsets.layers.count; ++l) {
    for (int64_t i = 0; i < m; ++i) {
      const double wanted = product(rows, i, rows, i, offsets[l], offsets[l + 1]);
      check("squares", l * m + i, squares.as<double>()[l * m + i], wanted);
    }
  }
  return 1;
}

int64_t layer_dots() {
  const int64_t m = any_rows(), n = any_columns(m);
  describe("layer_dots", m, n);
  const DType dtype = any_dtype();
  const Values values = any_values(dtype);
  const Rows rows(m, n, dtype, values), step(1, n, dtype, values);
  const Offsets offsets(n);
  Buffer dots(offsets.layers.count * m, 8);
  const auto run = [&](ParallelFor parallel) {
    cpu::layer_dots(rows.matrix, step.matrix.data, offsets.layers, dots.as<double>(), parallel);
  };
  if (values == Values::bits) return same_bits_twice({&dots}, run), 2;
  run(any_parallel());
  for (int64_t l = 0; l < offsets.layers.count; ++l) {
    for (int64_t i = 0; i < m; ++i) {
      const double wanted = product(rows, i, step, 0, offsets[l], offsets[l + 1]);
      check("dots", l * m + i, dots.as<double>()[l * m + i], wanted);
    }
  }
  return 1;
}

int64_t layer_combine() {
  const DType dtype = any_dtype();
  const int64_t m = any_rows(), n = any_columns_of_output(m, dtype);
  describe("layer_combine", m, n);
  const Values values = any_values(dtype) == Values::bits ? Values::bits : Values::whole;
  const Rows rows(m, n, dtype, values);
  const Offsets offsets(n);
  const bool add = one_in(2);
  Buffer coeff(offsets.layers.count * m, 8), out(n, size_of(dtype));
  for (int64_t i = 0; i < offsets.layers.count * m; ++i) coeff.as<double>()[i] = static_cast<double>(between(-1, 1));
  const auto run = [&](ParallelFor parallel) {
    for (int64_t c = 0; add && c < n; ++c) put(out.as<void>(), c, dtype, 5);
    cpu::layer_combine(rows.matrix, offsets.layers, coeff.as<double>(), out.as<void>(), add, parallel);
  };
  if (values == Values::bits) return same_bits_twice({&out}, run), 2;
  run(any_parallel());
  for (int64_t l = 0; l < offsets.layers.count; ++l) {
    for (int64_t c = offsets[l]; c < offsets[l + 1]; ++c) {
      double total = add ? 5 : 0;
      for (int64_t i = 0; i < m; ++i) total += coeff.as<double>()[l * m + i] * rows.at(i, c);
      check("step", c, get(out.as<void>(), c, dtype), rounded(total, dtype));
    }
  }
  return 1;
}

int64_t layer_cross_combine() {
  const DType dtype = any_dtype();
  const int64_t m = any_rows(), n = any_columns_of_output(m, dtype), h = between(0, 8), terms = m + h;
  describe("layer_cross_combine", m, n);
  const Rows rows(m, n, dtype, Values::whole), others(h, n, dtype, Values::whole);
  const Offsets offsets(n);
  Buffer coeff(offsets.layers.count * terms, 8), out(n, size_of(dtype));
  for (int64_t i = 0; i < offsets.layers.count * terms; ++i) {
    coeff.as<double>()[i] = static_cast<double>(between(-1, 1));
  }
  cpu::layer_cross_combine(rows.matrix, others.matrix, offsets.layers, coeff.as<double>(), out.as<void>(),
                           any_parallel());
  for (int64_t l = 0; l < offsets.layers.count; ++l) {
    for (int64_t c = offsets[l]; c < offsets[l + 1]; ++c) {
      double total = 0;
      for (int64_t i = 0; i < terms; ++i) {
        total += coeff.as<double>()[l * terms + i] * (i < m ? rows.at(i, c) : others.at(i - m, c));
      }
      check("step", c, get(out.as<void>(), c, dtype), rounded(total, dtype));
    }
  }
  return 1;
}

int64_t puc_combine() {
  const DType dtype = any_dtype();
  const int64_t m = any_rows(), n = any_columns_of_output(m, dtype), words = (n + 31) / 32;
  describe("puc_combine", m, n);
  const Values values = any_values(dtype) == Values::bits ? Values::bits : Values::whole;
  const Rows rows(m, n, dtype, values);
  Buffer keep(m * words, 4), weights(m, 8), out(n, size_of(dtype));
  // What lies behind the last bit may be anything.
  for (int64_t i = 0; i < m * words; ++i) keep.as<uint32_t>()[i] = static_cast<uint32_t>(random_bits() & random_bits());
  for (int64_t i = 0; i < m; ++i) {
    const double weight = static_cast<double>(between(1, 3));
    weights.as<double>()[i] =
        values == Values::bits ? std::ldexp(weight, static_cast<int>(between(-1000, 1000))) : weight;
  }
  const auto run = [&](ParallelFor parallel) {
    cpu::puc_combine(rows.matrix, keep.as<int32_t>(), weights.as<double>(), out.as<void>(), parallel);
  };
  if (values == Values::bits) return same_bits_twice({&out}, run), 2;
  run(any_parallel());
  for (int64_t c = 0; c < n; ++c) {
    double total = 0, mass = 0;
    for (int64_t i = 0; i < m; ++i) {
      const double weight = (keep.as<uint32_t>()[i * words + c / 32] >> (c % 32) & 1u) * weights.as<double>()[i];
      total += weight * rows.at(i, c);
      mass += weight;
    }
    check("mean", c, get(out.as<void>(), c, dtype), rounded(mass == 0 ? 0.0 : total / mass, dtype));
  }
  return 1;
}

int64_t trimmed_mean() {
  const DType dtype = any_dtype();
  const int64_t m = any_rows(), n = any_columns_of_output(m, dtype), trim = between(0, (m - 1) / 2);
  describe("trimmed_mean", m, n);
  const Values values = any_values(dtype) == Values::bits ? Values::bits : Values::whole;
  const Rows rows(m, n, dtype, values);
  Buffer out(n, size_of(dtype));
  const auto run = [&](ParallelFor parallel) { cpu::trimmed_mean(rows.matrix, trim, out.as<void>(), parallel); };
  if (values == Values::bits) return same_bits_twice({&out}, run), 2;
  run(any_parallel());
  std::vector<double> column(static_cast<std::size_t>(m));
  for (int64_t c = 0; c < n; ++c) {
    for (int64_t i = 0; i < m; ++i) column[static_cast<std::size_t>(i)] = rows.at(i, c);
    std::sort(column.begin(), column.end());
    const double total = std::accumulate(column.begin() + trim, column.end() - trim, 0.0);
    check("mean", c, get(out.as<void>(), c, dtype), rounded(total / static_cast<double>(m - 2 * trim), dtype));
  }
  return 1;
}

namespace {

template <class Count>
int64_t puc_track_of(CountType type, int64_t most) {
  const int64_t n = any_columns(1), words = (n + 31) / 32;
  describe("puc_track", 1, n);
  const DType dtype = any_dtype();
  const Values values = one_in(4) ? Values::bits : Values::whole;
  const Rows row(1, n, dtype, values);
  const Offsets offsets(n);
  const int64_t taken = one_in(8) ? most - 1 : between(0, one_in(2) ? 250 : 3);
  const int64_t threshold = one_in(20) ? INT64_MAX : one_in(20) ? between(0, int64_t{1} << 40) : between(0, taken + 2);
  Buffer counts(n, sizeof(Count)), keep(words, 4), norms(offsets.layers.count, 8);
  std::vector<Count> past(static_cast<std::size_t>(n));
  for (auto& count : past) count = static_cast<Count>(between(0, taken));
  const auto run = [&](ParallelFor parallel) {
    for (int64_t c = 0; c < n; ++c) counts.as<Count>()[c] = past[static_cast<std::size_t>(c)];
    cpu::puc_track(row.matrix, counts.as<void>(), type, threshold, taken, offsets.layers, keep.as<int32_t>(),
                   norms.as<double>(), parallel);
  };
  if (values == Values::bits) {
    same_bits_twice({&counts, &keep, &norms}, run);
  } else {
    run(any_parallel());
  }
  for (int64_t l = 0; l < offsets.layers.count; ++l) {
    double norm = 0;
    for (int64_t c = offsets[l]; c < offsets[l + 1]; ++c) {
      const int64_t before = past[static_cast<std::size_t>(c)];
      const bool up = row.at(0, c) <= 0, kept = (up ? before : taken - before) >= threshold;
      check("count", c, counts.as<Count>()[c], static_cast<double>(before + up));
      check("bit", c, keep.as<uint32_t>()[c / 32] >> (c % 32) & 1u, kept);
      norm += kept ? row.at(0, c) * row.at(0, c) : 0;
    }
    if (values == Values::whole) check("norm", l, norms.as<double>()[l], norm);
  }
  for (int64_t c = n; c < 32 * words; ++c) check("bit", c, keep.as<uint32_t>()[c / 32] >> (c % 32) & 1u, 0);
  return values == Values::bits ? 2 : 1;
}

}  // namespace

int64_t puc_track() {
  switch (between(0, 2)) {
    case 0:
      return puc_track_of<std::uint8_t>(CountType::u8, 0xff);
    case 1:
      return puc_track_of<std::int16_t>(CountType::i16, 0x7fff);
    default:
      return puc_track_of<int32_t>(CountType::i32, 0x7fffffff);
  }
}

}  // namespace fuzz
