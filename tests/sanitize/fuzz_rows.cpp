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

// Now and then so many that results are written past the caches.
int64_t any_columns_of_output(int64_t rows, DType dtype) {
  return one_in(1000) ? (int64_t{1} << 25) / size_of(dtype) / (rows + 1) + between(0, 200) : any_columns(rows);
}

DType dtype_beside(DType dtype) { return one_in(2) ? dtype : any_dtype(); }

// Rows of a call, and how many.
struct Given {
  explicit Given(const char* op) { describe(op, m, n); }
  // As many others, maybe of another dtype.
  Rows others(int64_t count) {
    const DType dtype = dtype_beside(rows.matrix.dtype);
    const Values own = any_values(dtype);
    exact = exact && own != Values::bits;
    return {count, n, dtype, own};
  }
  int64_t m = any_rows(), n = any_columns(m);
  DType dtype = any_dtype();
  Values values = any_values(dtype);
  bool exact = values != Values::bits;
  Rows rows{m, n, dtype, values};
};

// Calls run(layers, results, parallel), whose results of a layer are sums of products of rows i with others j, where
// pair(e) = {i, j} for e < count.
template <class Run, class Pair>
int64_t check_products(const Given& given, const Rows& others, int64_t count, Run run, Pair pair) {
  const Offsets offsets(given.n);
  Buffer sums(offsets.layers.count * count, 8);
  const auto call = [&](ParallelFor parallel) { run(offsets.layers, sums.as<double>(), parallel); };
  if (!given.exact) return same_bits_twice({&sums}, call), 2;
  call(any_parallel());
  for (int64_t at = 0; at < offsets.layers.count * count; ++at) {
    const auto [i, j] = pair(at % count);
    double total = 0;
    for (int64_t c = offsets[at / count]; c < offsets[at / count + 1]; ++c)
      total += given.rows.at(i, c) * others.at(j, c);
    check("sum", at, sums.as<double>()[at], total);
  }
  return 1;
}

// Of a matrix with so many columns.
auto entry(int64_t columns) {
  return [=](int64_t e) { return std::pair(e / columns, e % columns); };
}

}  // namespace

int64_t layer_gram() {
  const Given given("layer_gram");
  const auto run = [&](Layers layers, double* sums, ParallelFor parallel) {
    cpu::layer_gram(given.rows.matrix, layers, sums, parallel);
  };
  return check_products(given, given.rows, given.m * given.m, run, entry(given.m));
}

int64_t layer_squares() {
  const Given given("layer_squares");
  const auto run = [&](Layers layers, double* sums, ParallelFor parallel) {
    cpu::layer_squares(given.rows.matrix, layers, sums, parallel);
  };
  return check_products(given, given.rows, given.m, run, [](int64_t e) { return std::pair(e, e); });
}

int64_t layer_cross_gram() {
  Given given("layer_cross_gram");
  const Rows others = given.others(between(0, 8));
  const int64_t h = others.matrix.rows;
  const auto run = [&](Layers layers, double* sums, ParallelFor parallel) {
    cpu::layer_cross_gram(given.rows.matrix, others.matrix, layers, sums, parallel);
  };
  return check_products(given, others, given.m * h, run, entry(h));
}

int64_t layer_chosen_gram() {
  Given given("layer_chosen_gram");
  const int64_t h = between(1, 30), count = between(0, 30);
  const Rows others = given.others(h);
  Buffer chosen(count, 8);
  for (int64_t j = 0; j < count; ++j) chosen.as<int64_t>()[j] = between(0, h - 1);
  const auto run = [&](Layers layers, double* sums, ParallelFor parallel) {
    cpu::layer_chosen_gram(given.rows.matrix, others.matrix, chosen.as<int64_t>(), count, layers, sums, parallel);
  };
  return check_products(given, others, given.m * count, run,
                        [&](int64_t e) { return std::pair(e / count, chosen.as<int64_t>()[e % count]); });
}

int64_t layer_dots() {
  const Given given("layer_dots");
  const Rows step(1, given.n, given.dtype, given.values);
  const auto run = [&](Layers layers, double* sums, ParallelFor parallel) {
    cpu::layer_dots(given.rows.matrix, step.matrix.data, layers, sums, parallel);
  };
  return check_products(given, step, given.m, run, entry(1));
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
