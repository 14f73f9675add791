// SPDX-License-Identifier: Apache-2.0
// What the random calls share: numbers, memory whose edges are watched, rows, layers, and ways to run tasks.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <vector>

#include "../../csrc/ops.h"

namespace fuzz {

using fl_lightning::CountType, fl_lightning::DType, fl_lightning::Layers, fl_lightning::Matrix;
using fl_lightning::cpu::ParallelFor;
using std::int32_t, std::int64_t, std::uint32_t;

// Starts the call of this number: the same number, the same call.
void start(std::uint64_t seed, std::int64_t call);
int64_t between(int64_t low, int64_t high);
double normal();
bool one_in(int64_t count);
std::uint64_t random_bits();

// A number that comes up in shapes: mostly small, around the widths of vectors and blocks; seldom above a task's size.
int64_t any_rows();
int64_t any_columns(int64_t rows);

// Ends the process with what was called, what was found and what is right.
[[noreturn]] void fail(const char* result, int64_t index, double found, double wanted);
void check(const char* result, int64_t index, double found, double wanted);
void check_close(const char* result, int64_t index, double found, double wanted, double tolerance);
// Describes the call in progress, for fail.
void describe(const char* op, int64_t m, int64_t n);

// Memory of exactly this size, full of garbage, at any alignment that its elements allow; poisoned before and after.
// Poison begins and ends at multiples of eight bytes: between those and the first element, only writes are found.
class Buffer {
 public:
  Buffer(int64_t count, int64_t element_size);
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  // Other garbage than before.
  void spoil();
  std::vector<char> bytes() const;

 private:
  int64_t size_, before_;
  char *store_, *data_;
};

int64_t size_of(DType dtype);
double get(const void* data, int64_t i, DType dtype);
void put(void* data, int64_t i, DType dtype, double x);
// x as an element of this dtype.
double rounded(double x, DType dtype);
DType any_dtype();

enum class Values {
  whole,   // small whole numbers: every sum is exact in every dtype, so results must be equal
  scaled,  // the same times a power of two per row, to the edges of the range: still exact in float64
  bits,    // any bits: NaN, infinities, subnormal numbers
};
Values any_values(DType dtype);

// Rows at some distance from each other; the last one ends where its memory ends.
struct Rows {
  Rows(int64_t m, int64_t n, DType dtype, Values values);
  double at(int64_t i, int64_t c) const { return numbers[static_cast<std::size_t>(i * matrix.columns + c)]; }

  std::unique_ptr<Buffer> buffer;
  Matrix matrix;
  std::vector<double> numbers;
};

struct Offsets {
  explicit Offsets(int64_t n);
  int64_t operator[](int64_t i) const { return buffer->as<int64_t>()[i]; }
  std::unique_ptr<Buffer> buffer;
  Layers layers;
};

// Tasks in order, in reverse, or on two or three threads: results may not depend on it.
ParallelFor any_parallel();

// Calls op twice, on other garbage and with other threads, and compares the bits of its results.
void same_bits_twice(std::initializer_list<Buffer*> results, const std::function<void(ParallelFor)>& op);

// One random call each; the number of calls of the kernel that were made.
int64_t layer_gram();
int64_t layer_squares();
int64_t layer_cross_gram();
int64_t layer_chosen_gram();
int64_t layer_dots();
int64_t layer_combine();
int64_t layer_cross_combine();
int64_t puc_track();
int64_t puc_combine();
int64_t trimmed_mean();
int64_t project_conflicts();
int64_t min_norm();
int64_t common_descent();
// A call of a kernel with a mistake, 1 to 8, or with none, 0.
int64_t fault(int kind);

}  // namespace fuzz
