// SPDX-License-Identifier: Apache-2.0
// Tensors as the plain arguments of ops.h, with the checks that memory safety depends on. This file and extension.cpp,
// which includes it, are the only ones that see torch.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops.h"

namespace fl_lightning {

using std::int32_t, std::int64_t;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Becomes Python's RuntimeError: no other can cross the stable interface.
template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

template <class T>
std::string listed(const T* first, int64_t count) {
  std::ostringstream text;
  text << "[";
  for (int64_t i = 0; i < count; ++i) text << (i ? ", " : "") << first[i];
  text << "]";
  return text.str();
}

inline DType dtype_of(const Tensor& t, const char* name = "rows") {
  switch (t.scalar_type()) {
    case ScalarType::Double:
      return DType::f64;
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::Half:
      return DType::f16;
    case ScalarType::BFloat16:
      return DType::bf16;
    default:
      throw std::invalid_argument(std::string(name) + " must be float64, float32, float16 or bfloat16");
  }
}

inline CountType count_type_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Byte:
      return CountType::u8;
    case ScalarType::Short:
      return CountType::i16;
    case ScalarType::Int:
      return CountType::i32;
    default:
      throw std::invalid_argument("counts must be uint8, int16 or int32");
  }
}

inline int64_t largest_count(CountType type) {
  return type == CountType::u8 ? UINT8_MAX : type == CountType::i16 ? INT16_MAX : INT32_MAX;
}

inline void require_type(const char* name, const Tensor& t, ScalarType type) {
  require(t.scalar_type() == type, name, " has the wrong dtype");
}

inline void require_shape(const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
  bool same = t.dim() == static_cast<int64_t>(shape.size());
  for (int64_t i = 0; same && i < t.dim(); ++i) same = t.size(i) == shape.begin()[i];
  if (!same) {
    require(false, name, " must have shape ", listed(shape.begin(), static_cast<int64_t>(shape.size())));
  }
}

inline void require_beside(const char* name, const Tensor& t, const Tensor& rows) {
  require(t.device() == rows.device(), name, " must be on the rows' device");
}

inline void require_others(const Tensor& others, const Tensor& rows) {
  require(others.size(1) == rows.size(1), "others must have shape [any, ", rows.size(1), "]");
  require_beside("others", others, rows);
}

inline void require_some_rows(const Tensor& rows) {
  require(rows.dim() == 2 && rows.size(0) > 0, "rows must have shape [m, n] with at least one row");
}

// An op is about to write to this vector: its version rises, so that a backward pass for which autograd has kept the
// old values raises. The stable interface has no call for that, but torch's own ops in place do it, on no element too.
inline void begin_write(const char* name, Tensor t) {
  require(t.numel() < 2 || t.stride(0) != 0, name, " must have one place in memory for each element");
  Tensor none = torch::stable::narrow(t, 0, 0, 0);
  torch::stable::zero_(none);
}

// No element of a vector that is written to lies where rows are read. Where one of them is not contiguous, the op works
// on a copy, which lies apart.
inline void require_apart(const char* name, const Tensor& out, const Tensor& rows) {
  const int64_t columns = rows.size(rows.dim() - 1), count = rows.dim() == 2 ? rows.size(0) : 1;
  if (!out.is_contiguous() || (columns > 1 && rows.stride(rows.dim() - 1) != 1)) return;
  const auto* begin = static_cast<const char*>(out.const_data_ptr());
  const auto* end = begin + out.numel() * static_cast<int64_t>(out.element_size());
  const int64_t size = static_cast<int64_t>(rows.element_size());
  const int64_t stride = rows.dim() == 2 ? rows.stride(0) * size : 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto* row = static_cast<const char*>(rows.const_data_ptr()) + i * stride;
    require(end <= row || row + columns * size <= begin, name, " must share no memory with the rows");
  }
}

// Contiguous, in a dtype.
inline Tensor usable(const Tensor& t, ScalarType type) {
  return torch::stable::contiguous(t.scalar_type() == type ? t : torch::stable::to(t, type));
}

// Columns must be contiguous, rows may be apart: a slice of a larger matrix is used where it lies.
inline Tensor with_columns_contiguous(const Tensor& t, const char* name = "rows") {
  require(t.dim() == 2, name, " must have shape [m, n], found ", t.dim(), " dimensions");
  const bool fine = (t.size(1) <= 1 || t.stride(1) == 1) && t.stride(0) >= 0;
  return fine ? t : torch::stable::contiguous(t);
}

inline Matrix vector_of(const Tensor& t, const char* name) {
  require(t.dim() == 1, name, " must be a vector, found ", t.dim(), " dimensions");
  return {t.const_data_ptr(), 1, t.size(0), t.size(0), dtype_of(t, name)};
}

// Of what with_columns_contiguous returned.
inline Matrix matrix_of(const Tensor& t) {
  return {t.const_data_ptr(), t.size(0), t.size(1), t.stride(0), dtype_of(t)};
}

// Of a matrix that is a run of the columns of another, total_columns is the number of that one's.
inline Layers layers_of(const Tensor& offsets, int64_t columns, std::optional<int64_t> total_columns = std::nullopt) {
  require_type("offsets", offsets, ScalarType::Long);
  require(offsets.dim() == 1 && offsets.size(0) >= 2 && offsets.is_cpu(), "offsets must be a CPU vector of L + 1");
  const auto* first = static_cast<const int64_t*>(offsets.const_data_ptr());
  const int64_t count = offsets.size(0) - 1;
  if (first[0] != 0 || first[count] != columns || !std::is_sorted(first, first + count + 1)) {
    require(false, "offsets must rise from 0 to n = ", columns, " without decreasing, found ",
            listed(first, count + 1));
  }
  return {first, count, slice_columns(total_columns.value_or(columns))};
}

inline Tensor empty(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType type) {
  return torch::stable::empty(shape, type, std::nullopt, like.device());
}

template <class T>
const T* read(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* write(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Numbers that an op reads as float64, whatever floating-point type they come in.
inline void require_numbers(const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
  require_shape(name, t, shape);
  dtype_of(t, name);
}

inline void check_order(const Tensor& order, int64_t m) {
  require_type("order", order, ScalarType::Long);
  require_shape("order", order, {m});
  if (!order.is_cpu()) return;
  const Tensor own = torch::stable::contiguous(order);
  std::vector<int64_t> sorted(read<int64_t>(own), read<int64_t>(own) + m);
  std::sort(sorted.begin(), sorted.end());
  for (int64_t i = 0; i < m; ++i) {
    if (sorted[static_cast<std::size_t>(i)] == i) continue;
    require(false, "order must be a permutation of 0..", m - 1, ", found ", listed(read<int64_t>(own), m));
  }
}

inline void check_weights(const Tensor& weights) {
  if (!weights.is_cpu()) return;
  const Tensor own = usable(weights, ScalarType::Double);
  const auto* first = read<double>(own);
  const bool positive = std::all_of(first, first + own.numel(), [](double w) { return w > 0; });
  if (!positive) require(false, "weights must be positive, found ", listed(first, own.numel()));
}

}  // namespace fl_lightning
