// SPDX-License-Identifier: Apache-2.0
// Runs of neighbouring columns, loaded and stored in vectors of up to 16 bytes.
//
// A run starts where its row's address is a multiple of the run's size if the rows allow it. The first and last run of
// an item may reach beyond it; what lies outside is neither read nor written, and counts as 0.
#pragma once

#include "device.cuh"

namespace fl_lightning::cuda {

template <class T>
constexpr int kRun = 16 / sizeof(T);  // columns of a run of 16 bytes

template <class T, int kBytes>
struct alignas(kBytes) Vector {
  T values[kBytes / sizeof(T)];
};

// The widest vectors (in bytes, at most 16) that are aligned at this column of every row.
template <class T>
__device__ inline int vector_width(const T* rows, std::int64_t stride, std::int64_t column) {
  const auto bits = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(rows + column)) |
                    static_cast<unsigned>(stride * static_cast<std::int64_t>(sizeof(T))) | 16u;
  return static_cast<int>(bits & (0u - bits));
}

// The last column at or before start whose address in the first row is a multiple of 16 bytes; it may be negative.
template <class T>
__device__ inline std::int64_t aligned_start(const T* rows, std::int64_t start) {
  return start - static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(rows + start) / sizeof(T) % kRun<T>);
}

template <int kBytes, int kCount, class T>
__device__ inline void load_vectors(const T* from, T (&to)[kCount]) {
  constexpr int kEach = kBytes / static_cast<int>(sizeof(T));
  if constexpr (kEach > kCount) {
    load_vectors<kBytes / 2>(from, to);
  } else if constexpr (kEach >= 1) {
#pragma unroll
    for (int k = 0; k < kCount / kEach; ++k) {
      const auto vector = reinterpret_cast<const Vector<T, kBytes>*>(from)[k];
#pragma unroll
      for (int e = 0; e < kEach; ++e) to[k * kEach + e] = vector.values[e];
    }
  }
}

template <int kBytes, int kCount, class T>
__device__ inline void store_vectors(const T (&from)[kCount], T* to) {
  constexpr int kEach = kBytes / static_cast<int>(sizeof(T));
  if constexpr (kEach >= 1) {
#pragma unroll
    for (int k = 0; k < kCount / kEach; ++k) {
      Vector<T, kBytes> vector;
#pragma unroll
      for (int e = 0; e < kEach; ++e) vector.values[e] = from[k * kEach + e];
      reinterpret_cast<Vector<T, kBytes>*>(to)[k] = vector;
    }
  }
}

// The same to memory of the device, by one instruction per vector: a copy of a struct may be split where branches for
// several widths join. Outputs are written once, so they leave the second-level cache to what is read again.
template <int kBytes, int kCount, class T>
__device__ inline void store_streamed(const T (&from)[kCount], T* to) {
  using Word = std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, unsigned>>;
  if constexpr (kBytes > kCount * sizeof(T)) {
    store_streamed<kBytes / 2>(from, to);
  } else if constexpr (kBytes < 4) {
    store_vectors<kBytes>(from, to);
  } else if constexpr (kBytes >= sizeof(T)) {
    constexpr int kEach = kBytes / static_cast<int>(sizeof(T));
#pragma unroll
    for (int k = 0; k < kCount / kEach; ++k) {
      Word word;
      memcpy(&word, from + k * kEach, kBytes);
      __stcs(reinterpret_cast<Word*>(to) + k, word);
    }
  }
}

// The run of one row that starts at column; width is the row's vector_width there.
template <int kCount, class T>
__device__ inline void load_run(const T* row, std::int64_t column, std::int64_t start, std::int64_t stop, int width,
                                T (&to)[kCount]) {
  if (column < start || column + kCount > stop) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      const bool inside = column + v >= start && column + v < stop;
      to[v] = inside ? row[column + v] : narrow<T>(0.0);
    }
  } else if (width == 16) {
    load_vectors<16>(row + column, to);
  } else if (width == 8) {
    load_vectors<8>(row + column, to);
  } else if (width == 4) {
    load_vectors<4>(row + column, to);
  } else {
    load_vectors<sizeof(T)>(row + column, to);
  }
}

template <int kCount, class T>
__device__ inline void store_run(const T (&from)[kCount], std::int64_t column, std::int64_t start, std::int64_t stop,
                                 int width, T* row) {
  if (column < start || column + kCount > stop) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (column + v >= start && column + v < stop) row[column + v] = from[v];
    }
  } else if (width == 16) {
    store_streamed<16>(from, row + column);
  } else if (width == 8) {
    store_streamed<8>(from, row + column);
  } else if (width == 4) {
    store_streamed<4>(from, row + column);
  } else {
    store_streamed<sizeof(T)>(from, row + column);
  }
}

// A run as it lies in memory. Two narrow numbers stay in one register: unpacked they would take two.
template <class T, int kBytes = 16>
struct Run {
  using Stored = std::conditional_t<sizeof(T) == 2, unsigned, T>;
  static constexpr int kCount = kBytes / sizeof(T);
  Stored stored[kBytes / sizeof(Stored)];

  template <class Real>
  __device__ Real get(int v) const {
    if constexpr (std::is_same_v<T, __half>) {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(stored[v / 2] >> v % 2 * 16)));
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(v % 2 ? stored[v / 2] & 0xffff0000u : stored[v / 2] << 16);
    } else {
      return widen<Real>(stored[v]);
    }
  }
  template <int kVector>
  __device__ void load(const T* from) {
    if constexpr (sizeof(T) != 2) {
      load_vectors<kVector>(from, stored);
    } else if constexpr (kVector >= 4) {
      load_vectors<kVector>(reinterpret_cast<const unsigned*>(from), stored);
    } else {
      const auto* halves = reinterpret_cast<const unsigned short*>(from);
#pragma unroll
      for (int k = 0; k < kCount / 2; ++k) stored[k] = halves[2 * k] | static_cast<unsigned>(halves[2 * k + 1]) << 16;
    }
  }
  // Elements [start, stop) alone; the others are 0.
  __device__ void load_part(const T* from, std::int64_t start, std::int64_t stop) {
    clear();
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (v < start || v >= stop) continue;
      if constexpr (sizeof(T) == 2) {
        stored[v / 2] |= static_cast<unsigned>(reinterpret_cast<const unsigned short*>(from)[v]) << v % 2 * 16;
      } else {
        stored[v] = from[v];
      }
    }
  }
  __device__ void clear() {
#pragma unroll
    for (auto& each : stored) each = Stored{0};
  }
};

// The runs at one column of kRows rows, which all have this width; rows from count on are 0. One branch around all
// rows: their loads then stand together and wait together.
template <int kRows, class T, int kBytes>
__device__ inline void load_runs(const T* rows, std::int64_t stride, std::int64_t count, std::int64_t column,
                                 std::int64_t start, std::int64_t stop, int width, Run<T, kBytes> (&to)[kRows]) {
  const auto each = [&](auto load) {
    const T* from = rows + column;
#pragma unroll
    for (int r = 0; r < kRows; ++r, from += stride) {
      if (r < count) {
        load(from, to[r]);
      } else {
        to[r].clear();
      }
    }
  };
  if (column < start || column + Run<T, kBytes>::kCount > stop) {
    each([&](const T* from, auto& run) { run.load_part(from, start - column, stop - column); });
  } else if (width == 16) {
    each([](const T* from, auto& run) { run.template load<16>(from); });
  } else if (width == 8) {
    each([](const T* from, auto& run) { run.template load<8>(from); });
  } else if (width == 4) {
    each([](const T* from, auto& run) { run.template load<4>(from); });
  } else {
    each([](const T* from, auto& run) { run.template load<sizeof(T)>(from); });
  }
}

// Runs in shared memory, by their place in an array. The first form is for a checked array of the tests.
template <class Shared, class T, int kCount>
__device__ inline void load_shared(Shared from, int at, T (&to)[kCount]) {
  for (int v = 0; v < kCount; ++v) to[v] = from[at + v];
}
template <class T, int kCount>
__device__ inline void load_shared(T* from, int at, T (&to)[kCount]) {
  load_vectors<16>(from + at, to);
}
template <class Shared, class T, int kCount>
__device__ inline void store_shared(const T (&from)[kCount], Shared to, int at) {
  for (int v = 0; v < kCount; ++v) to[at + v] = from[v];
}
template <class T, int kCount>
__device__ inline void store_shared(const T (&from)[kCount], T* to, int at) {
  store_vectors<16>(from, to + at);
}

// A row whose type is known at run time only: all threads of a launch take the same branch.
template <class F>
__device__ inline void visit_row(const Matrix& matrix, std::int64_t row, F&& function) {
  const std::int64_t first = row * matrix.stride;
  switch (matrix.dtype) {
    case DType::f64:
      return function(static_cast<const double*>(matrix.data) + first);
    case DType::f32:
      return function(static_cast<const float*>(matrix.data) + first);
    case DType::f16:
      return function(static_cast<const __half*>(matrix.data) + first);
    case DType::bf16:
      return function(static_cast<const __nv_bfloat16*>(matrix.data) + first);
  }
}

template <int kCount, class Real>
__device__ inline void load_widened(const Matrix& matrix, std::int64_t row, std::int64_t column, std::int64_t start,
                                    std::int64_t stop, int width, Real (&to)[kCount]) {
  visit_row(matrix, row, [&](auto* values) {
    std::remove_const_t<std::remove_pointer_t<decltype(values)>> run[kCount];
    load_run(values, column, start, stop, width, run);
#pragma unroll
    for (int v = 0; v < kCount; ++v) to[v] = widen<Real>(run[v]);
  });
}

__device__ inline int vector_width(const Matrix& matrix, std::int64_t column) {
  int width = 0;
  visit_row(matrix, 0, [&](auto* values) { width = vector_width(values, matrix.stride, column); });
  return width;
}

}  // namespace fl_lightning::cuda
