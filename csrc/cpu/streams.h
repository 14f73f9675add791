// SPDX-License-Identifier: Apache-2.0
// What the kernels that pass over the columns once share: sizes of blocks and tasks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../ops.h"
#include "half.h"
#include "scratch.h"

namespace fl_lightning::cpu {

// Columns whose sums stay in the second-level cache while the rows pass by, some at a time.
inline constexpr std::int64_t kBlockColumns = 16384;
// Rows at a time: with more streams memory gets slower.
inline constexpr std::int64_t kSweepRows = 5;
// Bytes ahead of the use that a row is asked for.
inline constexpr std::int64_t kAhead = 2048;
// An output with its input this large is not wanted in the cache.
inline constexpr std::int64_t kStreamBytes = std::int64_t{1} << 25;

inline std::int64_t size_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

// Columns of a task: about 128K elements, whole blocks, whatever the number of threads.
inline std::int64_t task_columns(std::int64_t rows) {
  const std::int64_t blocks = (std::int64_t{1} << 17) / kBlockColumns / std::max<std::int64_t>(rows, 1);
  return kBlockColumns * std::max<std::int64_t>(blocks, 1);
}

inline bool beyond_cache(const Matrix& rows) {
  return (rows.rows + 1) * rows.columns * size_of(rows.dtype) >= kStreamBytes;
}

// Calls function<element type> arguments.
#define FL_BY_DTYPE(dtype, function, arguments) \
  switch (dtype) {                              \
    case DType::f64:                            \
      function<double> arguments;               \
      break;                                    \
    case DType::f32:                            \
      function<float> arguments;                \
      break;                                    \
    case DType::f16:                            \
      function<Half> arguments;                 \
      break;                                    \
    case DType::bf16:                           \
      function<BFloat16> arguments;             \
      break;                                    \
  }

// As a number: the address may lie beyond the row.
inline void prefetch_at(const void* p, std::int64_t bytes) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(p) + bytes));
}
inline void prefetch(const void* p) { prefetch_at(p, kAhead); }

struct Combine {
  DType dtype;
  void* out;
  bool add, stream;
};

// Rows of one combination, with their coefficients.
struct Terms {
  const void* const* rows;
  const double* coeff;
  std::int64_t count;
};

struct PucTrack {
  const void* row;
  DType dtype;
  void* counts;
  CountType type;
  // A coordinate is kept if its count is at least `low` where it increases, at most `high` where it does not.
  std::int64_t low, high;
  std::int32_t* keep;
};

struct PucCombine {
  Matrix rows;
  const std::int32_t* keep;
  const double* weights;
  void* out;
  bool stream;
};

}  // namespace fl_lightning::cpu
