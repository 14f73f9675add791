// SPDX-License-Identifier: Apache-2.0
// Rows as kernels read them: where they lie, what type their numbers have, and how to ask for them ahead of use.
#pragma once

#include <cstdint>

#include "../../tiles.h"
#include "../simd/half.h"

namespace fl_lightning::cpu {

// Rows of a matrix: all of them, or as many as are listed.
struct Rows : Matrix {
  const std::int64_t* listed = nullptr;

  // Elements before row r of these.
  std::int64_t at(std::int64_t r) const { return (listed ? listed[r] : r) * stride; }
};

inline std::int64_t size_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

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

// The address is computed as a number, because it may lie beyond the row.
inline void prefetch_at(const void* p, std::int64_t bytes) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(p) + bytes));
}
inline void prefetch(const void* p) { prefetch_at(p, kAhead); }

}  // namespace fl_lightning::cpu
