// SPDX-License-Identifier: Apache-2.0
#include "fuzz.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "../../csrc/cpu/simd/half.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace fuzz {

namespace cpu = fl_lightning::cpu;

namespace {
std::mt19937_64 generator;
std::string call_name, what;
constexpr char kMargin = 0x5a;
}  // namespace

void start(std::uint64_t seed, std::int64_t call) {
  std::seed_seq numbers{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), static_cast<uint32_t>(call)};
  generator.seed(numbers);
  call_name = "seed " + std::to_string(seed) + ", call " + std::to_string(call);
  what = call_name;
}

int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }
double normal() { return std::normal_distribution<double>()(generator); }
bool one_in(int64_t count) { return between(1, count) == 1; }
std::uint64_t random_bits() { return generator(); }

int64_t any_rows() { return one_in(30) ? between(1, 70) : between(1, 12); }

int64_t any_columns(int64_t rows) {
  if (one_in(250)) return between(0, 400000 / rows);
  if (one_in(20)) return between(0, 16000 / rows);
  return one_in(2) ? between(0, 140) : between(0, 700);
}

void describe(const char* op, int64_t m, int64_t n) {
  what = call_name + ": " + op + ", m " + std::to_string(m) + ", n " + std::to_string(n);
}

void fail(const char* result, int64_t index, double found, double wanted) {
  std::printf("%s, %s\n  %s[%lld] is %.17g, not %.17g\n", cpu::instruction_set(), what.c_str(), result,
              static_cast<long long>(index), found, wanted);
  std::exit(1);
}

void check(const char* result, int64_t index, double found, double wanted) {
  if (!(found == wanted)) fail(result, index, found, wanted);
}

void check_close(const char* result, int64_t index, double found, double wanted, double tolerance) {
  if (!(std::fabs(found - wanted) <= tolerance)) fail(result, index, found, wanted);
}

Buffer::Buffer(int64_t count, int64_t element_size)
    : size_(count * element_size), before_(one_in(4) ? 0 : element_size * between(0, 64 / element_size)) {
  void* store = nullptr;
  if (posix_memalign(&store, 64, static_cast<std::size_t>(before_ + size_)) != 0) std::abort();
  store_ = static_cast<char*>(store);
  data_ = store_ + before_;
  std::memset(store_, kMargin, static_cast<std::size_t>(before_));
  spoil();
  ASAN_POISON_MEMORY_REGION(store_, static_cast<std::size_t>(before_));
}

Buffer::~Buffer() {
  ASAN_UNPOISON_MEMORY_REGION(store_, static_cast<std::size_t>(before_));
  for (int64_t i = 0; i < before_; ++i) check("margin", i - before_, store_[i], kMargin);
  std::free(store_);
}

void Buffer::spoil() {
  if (size_ > 0) std::memset(data_, static_cast<int>(between(0x11, 0xee)), static_cast<std::size_t>(size_));
}

std::vector<char> Buffer::bytes() const { return {data_, data_ + size_}; }

int64_t size_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

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

double rounded(double x, DType dtype) {
  alignas(8) char memory[8];
  put(memory, 0, dtype, x);
  return get(memory, 0, dtype);
}

DType any_dtype() { return static_cast<DType>(between(0, 3)); }

Values any_values(DType dtype) {
  if (one_in(4)) return Values::bits;
  return dtype != DType::f16 && one_in(3) ? Values::scaled : Values::whole;
}

Rows::Rows(int64_t m, int64_t n, DType dtype, Values values) {
  const int64_t stride = n + (one_in(2) ? between(0, 40) : 0);
  buffer = std::make_unique<Buffer>(m == 0 ? 0 : (m - 1) * stride + n, size_of(dtype));
  matrix = {buffer->as<void>(), m, n, stride, dtype};
  numbers.resize(static_cast<std::size_t>(m * n));
  for (int64_t i = 0; i < m; ++i) {
    const bool zero = one_in(10);
    const double scale = values == Values::scaled ? std::ldexp(1.0, static_cast<int>(between(-120, 120))) : 1.0;
    for (int64_t c = 0; c < n; ++c) {
      const int64_t at = i * stride + c;
      if (values == Values::bits) {
        const std::uint64_t bits = random_bits();
        std::memcpy(buffer->as<char>() + at * size_of(dtype), &bits, static_cast<std::size_t>(size_of(dtype)));
      } else {
        put(buffer->as<void>(), at, dtype, zero ? 0.0 : scale * static_cast<double>(between(-3, 3)));
      }
      numbers[static_cast<std::size_t>(i * n + c)] = get(buffer->as<void>(), at, dtype);
    }
  }
}

Offsets::Offsets(int64_t n) {
  const int64_t count = between(1, 7);
  buffer = std::make_unique<Buffer>(count + 1, sizeof(int64_t));
  auto* first = buffer->as<int64_t>();
  for (int64_t i = 1; i < count; ++i) first[i] = between(0, n);
  first[0] = 0;
  first[count] = n;
  std::sort(first, first + count);
  layers = {first, count, fl_lightning::slice_columns(one_in(4) ? between(n, int64_t{1} << 24) : n)};
}

namespace {

void in_order(int64_t tasks, cpu::Body body, void* context) {
  for (int64_t i = 0; i < tasks; ++i) body(i, context);
}
void in_reverse(int64_t tasks, cpu::Body body, void* context) {
  for (int64_t i = tasks; i-- > 0;) body(i, context);
}
template <int kThreads>
void on_threads(int64_t tasks, cpu::Body body, void* context) {
  std::vector<std::thread> threads;
  for (int64_t first = 0; first < kThreads; ++first) {
    threads.emplace_back([=] {
      for (int64_t i = first; i < tasks; i += kThreads) body(i, context);
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace

ParallelFor any_parallel() {
  if (one_in(20)) return one_in(2) ? on_threads<2> : on_threads<3>;
  return one_in(2) ? in_order : in_reverse;
}

void same_bits_twice(std::initializer_list<Buffer*> results, const std::function<void(ParallelFor)>& op) {
  std::vector<std::vector<char>> first;
  op(any_parallel());
  for (Buffer* result : results) {
    first.push_back(result->bytes());
    result->spoil();
  }
  op(any_parallel());
  std::size_t number = 0;
  for (Buffer* result : results) {
    const auto &before = first[number++], after = result->bytes();
    for (std::size_t i = 0; i < after.size(); ++i) check("byte", static_cast<int64_t>(i), after[i], before[i]);
  }
}

}  // namespace fuzz
