// SPDX-License-Identifier: Apache-2.0
// Calls the CPU kernels with random shapes, offsets, strides and alignments and compares every number with plain loops.
// `make sanitize` builds it with AddressSanitizer and UndefinedBehaviorSanitizer and runs it for each instruction set.
//
// All values are small whole numbers, for which every sum is exact in every format: results must be equal. Buffers end
// where the data ends, and what lies before the data is poisoned, so that no access outside goes unseen.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/cpu/half.h"
#include "../../csrc/ops.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

using namespace fl_lightning;
using std::int32_t, std::int64_t, std::uint32_t;

namespace {

std::mt19937_64 generator;
std::string what;  // the call in progress

int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }

[[noreturn]] void fail(const char* result, int64_t index, double found, double wanted) {
  std::printf("%s: %s[%lld] is %.17g, not %.17g\n", what.c_str(), result, static_cast<long long>(index), found, wanted);
  std::exit(1);
}

void check(const char* result, int64_t index, double found, double wanted) {
  if (found != wanted) fail(result, index, found, wanted);
}

int64_t size_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

// Memory at a random alignment, in multiples of `unit`, with poison before and after.
class Buffer {
 public:
  Buffer(int64_t count, int64_t unit) : before_(unit * between(0, 64 / unit)) {
    const int64_t bytes = before_ + count * unit;
    store_ = static_cast<char*>(std::malloc(static_cast<std::size_t>(bytes)));
    std::memset(store_, 0x5a, static_cast<std::size_t>(bytes));
    ASAN_POISON_MEMORY_REGION(store_, static_cast<std::size_t>(before_));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    ASAN_UNPOISON_MEMORY_REGION(store_, static_cast<std::size_t>(before_));
    std::free(store_);
  }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(store_ + before_);
  }

 private:
  int64_t before_;
  char* store_;
};

double get(const void* data, int64_t i, DType dtype) {
  switch (dtype) {
    case DType::f64:
      return static_cast<const double*>(data)[i];
    case DType::f32:
      return static_cast<const float*>(data)[i];
    case DType::f16:
      return cpu::widened(static_cast<const cpu::Half*>(data)[i]);
    default:
      return cpu::widened(static_cast<const cpu::BFloat16*>(data)[i]);
  }
}

void put(void* data, int64_t i, DType dtype, double x) {
  switch (dtype) {
    case DType::f64:
      return cpu::narrow(x, static_cast<double*>(data) + i);
    case DType::f32:
      return cpu::narrow(x, static_cast<float*>(data) + i);
    case DType::f16:
      return cpu::narrow(x, static_cast<cpu::Half*>(data) + i);
    default:
      return cpu::narrow(x, static_cast<cpu::BFloat16*>(data) + i);
  }
}

// Rows of small whole numbers, the last of which ends where the buffer ends.
struct Rows {
  Rows(int64_t m, int64_t n, DType dtype) : n(n), stride(n + between(0, 1) * between(0, 40)), dtype(dtype) {
    buffer = std::make_unique<Buffer>(m == 0 ? 0 : (m - 1) * stride + n, size_of(dtype));
    for (int64_t i = 0; i < m; ++i) {
      const bool zero = between(0, 9) == 0;
      for (int64_t c = 0; c < n; ++c) put(buffer->as<void>(), i * stride + c, dtype, zero ? 0 : double(between(-3, 3)));
    }
    matrix = {buffer->as<void>(), m, n, stride, dtype};
  }
  double at(int64_t i, int64_t c) const { return get(matrix.data, i * stride + c, dtype); }

  int64_t n, stride;
  DType dtype;
  std::unique_ptr<Buffer> buffer;
  Matrix matrix;
};

DType any_dtype() { return static_cast<DType>(between(0, 3)); }

std::vector<int64_t> any_offsets(int64_t n) {
  std::vector<int64_t> offsets(static_cast<std::size_t>(between(0, 5)) + 1);
  for (auto& x : offsets) x = between(0, n);
  offsets.push_back(0);
  offsets.push_back(n);
  std::sort(offsets.begin(), offsets.end());
  return offsets;
}

// Tasks in order, in reverse, or on two threads: the results may not depend on it.
void in_order(int64_t tasks, cpu::Body body, void* context) {
  for (int64_t i = 0; i < tasks; ++i) body(i, context);
}
void in_reverse(int64_t tasks, cpu::Body body, void* context) {
  for (int64_t i = tasks; i-- > 0;) body(i, context);
}
void on_two_threads(int64_t tasks, cpu::Body body, void* context) {
  std::thread other([=] {
    for (int64_t i = 1; i < tasks; i += 2) body(i, context);
  });
  for (int64_t i = 0; i < tasks; i += 2) body(i, context);
  other.join();
}
cpu::ParallelFor any_parallel() {
  const int64_t which = between(0, 40);
  return which == 0 ? on_two_threads : which % 2 ? in_reverse : in_order;
}

void fuzz_products(int64_t m, int64_t n) {
  const Rows rows(m, n, any_dtype()), others(between(0, 8), n, between(0, 1) ? rows.dtype : any_dtype());
  const auto offsets = any_offsets(n);
  const Layers layers{offsets.data(), static_cast<int64_t>(offsets.size()) - 1};
  const int64_t h = others.matrix.rows;
  Buffer gram(layers.count * m * m, 8), cross(layers.count * m * h, 8), dots(layers.count * m, 8);
  cpu::layer_gram(rows.matrix, layers, gram.as<double>(), any_parallel());
  cpu::layer_cross_gram(rows.matrix, others.matrix, layers, cross.as<double>(), any_parallel());
  const Rows step(1, n, rows.dtype);
  cpu::layer_dots(rows.matrix, step.matrix.data, layers, dots.as<double>(), any_parallel());
  for (int64_t l = 0; l < layers.count; ++l) {
    for (int64_t i = 0; i < m; ++i) {
      const auto product = [&](const Rows& right, int64_t j) {
        double total = 0;
        for (int64_t c = offsets[l]; c < offsets[l + 1]; ++c) total += rows.at(i, c) * right.at(j, c);
        return total;
      };
      for (int64_t j = 0; j <= i; ++j) {
        const int64_t at = (l * m + i) * m + j, mirror = (l * m + j) * m + i;
        check("gram", at, gram.as<double>()[at], product(rows, j));
        check("gram", mirror, gram.as<double>()[mirror], gram.as<double>()[at]);
      }
      for (int64_t j = 0; j < h; ++j) {
        const int64_t at = (l * m + i) * h + j;
        check("cross_gram", at, cross.as<double>()[at], product(others, j));
      }
      check("dots", l * m + i, dots.as<double>()[l * m + i], product(step, 0));
    }
  }
}

void fuzz_combine(int64_t m, int64_t n) {
  const Rows rows(m, n, any_dtype());
  const auto offsets = any_offsets(n);
  const Layers layers{offsets.data(), static_cast<int64_t>(offsets.size()) - 1};
  const bool add = between(0, 1);
  Buffer coeff(layers.count * m, 8), out(n, size_of(rows.dtype));
  for (int64_t i = 0; i < layers.count * m; ++i) coeff.as<double>()[i] = double(between(-1, 1));
  for (int64_t c = 0; add && c < n; ++c) put(out.as<void>(), c, rows.dtype, 5);
  cpu::layer_combine(rows.matrix, layers, coeff.as<double>(), out.as<void>(), add, any_parallel());
  for (int64_t l = 0; l < layers.count; ++l) {
    for (int64_t c = offsets[l]; c < offsets[l + 1]; ++c) {
      double total = add ? 5 : 0;
      for (int64_t i = 0; i < m; ++i) total += coeff.as<double>()[l * m + i] * rows.at(i, c);
      char rounded[8];
      put(rounded, 0, rows.dtype, total);
      check("step", c, get(out.as<void>(), c, rows.dtype), get(rounded, 0, rows.dtype));
    }
  }
}

void fuzz_puc_combine(int64_t m, int64_t n) {
  const Rows rows(m, n, any_dtype());
  const int64_t words = (n + 31) / 32;
  Buffer keep(m * words, 4), weights(m, 8), out(n, size_of(rows.dtype));
  for (int64_t i = 0; i < m * words; ++i) keep.as<uint32_t>()[i] = static_cast<uint32_t>(generator() & generator());
  for (int64_t i = 0; i < m; ++i) weights.as<double>()[i] = double(between(1, 3));
  cpu::puc_combine(rows.matrix, keep.as<int32_t>(), weights.as<double>(), out.as<void>(), any_parallel());
  for (int64_t c = 0; c < n; ++c) {
    double total = 0, mass = 0;
    for (int64_t i = 0; i < m; ++i) {
      const double weight = (keep.as<uint32_t>()[i * words + c / 32] >> (c % 32) & 1u) * weights.as<double>()[i];
      total += weight * rows.at(i, c);
      mass += weight;
    }
    char rounded[8];
    put(rounded, 0, rows.dtype, mass == 0 ? 0 : total / mass);
    check("mean", c, get(out.as<void>(), c, rows.dtype), get(rounded, 0, rows.dtype));
  }
}

template <class Count>
void fuzz_track(int64_t n, CountType type) {
  const Rows row(1, n, any_dtype());
  const auto offsets = any_offsets(n);
  const Layers layers{offsets.data(), static_cast<int64_t>(offsets.size()) - 1};
  const int64_t taken = between(0, between(0, 1) ? 250 : 3), words = (n + 31) / 32;
  const int64_t threshold = between(0, 20) == 0 ? between(0, int64_t{1} << 40) : between(0, taken + 2);
  Buffer counts(n, sizeof(Count)), keep(words, 4), norms(layers.count, 8);
  std::vector<Count> past(static_cast<std::size_t>(n));
  for (int64_t c = 0; c < n; ++c) counts.as<Count>()[c] = past[c] = static_cast<Count>(between(0, taken));
  cpu::puc_track(row.matrix, counts.as<void>(), type, threshold, taken, layers, keep.as<int32_t>(), norms.as<double>(),
                 any_parallel());
  for (int64_t l = 0; l < layers.count; ++l) {
    double norm = 0;
    for (int64_t c = offsets[l]; c < offsets[l + 1]; ++c) {
      const bool up = row.at(0, c) <= 0, kept = (up ? past[c] : taken - past[c]) >= threshold;
      check("count", c, counts.as<Count>()[c], past[c] + up);
      check("bit", c, keep.as<uint32_t>()[c / 32] >> (c % 32) & 1u, kept);
      norm += kept ? row.at(0, c) * row.at(0, c) : 0;
    }
    check("norm", l, norms.as<double>()[l], norm);
  }
  for (int64_t c = n; c < 32 * words; ++c) check("bit", c, keep.as<uint32_t>()[c / 32] >> (c % 32) & 1u, 0);
}

}  // namespace

int main(int count_of_arguments, char** arguments) {
  const int64_t calls = count_of_arguments > 1 ? std::atoll(arguments[1]) : 100000;
  for (int64_t call = 0; call < calls; ++call) {
    generator.seed(static_cast<std::uint64_t>(call));
    // Mostly shapes around the widths of vectors and blocks; now and then several tasks.
    const int64_t m = between(0, 30) ? between(1, 12) : between(1, 70);
    const int64_t n = between(0, 400) == 0 ? between(0, 400000 / m) : between(0, 1) ? between(0, 140) : between(0, 700);
    const int64_t kind = between(0, 5);
    what = "call " + std::to_string(call) + ", m " + std::to_string(m) + ", n " + std::to_string(n);
    if (kind <= 1) fuzz_products(m, n);
    if (kind == 2) fuzz_combine(m, n);
    if (kind == 3) fuzz_puc_combine(m, n);
    if (kind == 4) between(0, 1) ? fuzz_track<std::uint8_t>(n, CountType::u8) : fuzz_track<int32_t>(n, CountType::i32);
    if (kind == 5) fuzz_track<std::int16_t>(n, CountType::i16);
  }
  std::printf("%s: %lld calls agree with plain loops\n", cpu::instruction_set(), static_cast<long long>(calls));
}
