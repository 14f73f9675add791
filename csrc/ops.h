// SPDX-License-Identifier: Apache-2.0
// The ops as plain functions of pointers and sizes. Nothing here knows torch: tensors.h and extension.cpp do.
//
// What each op computes is defined by the pure-torch references, fl_lightning/ops/_reference.py and _gram_problems.py.
// Offsets are L + 1 numbers on the host that rise from 0 to the number of columns. All results are deterministic: sums
// run in a fixed order whatever the number of threads, and whatever part of the columns a process holds.
#pragma once

#include <cstdint>
#include <cstring>

namespace fl_lightning {

enum class DType : int { f64, f32, f16, bf16 };

// A matrix whose columns are contiguous; rows may be any distance apart. A vector is a matrix with one row.
struct Matrix {
  const void* data;
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t stride;  // elements from one row to the next
  DType dtype;
};

// Sums over columns are taken slice by slice and added along a binary tree over the slices' numbers, as
// fl_lightning/ops/slices.py says. The matrix may be a run of the columns of another, but of a node of its tree: then
// this matrix's own tree is that node.
inline constexpr std::int64_t kLeastSlice = 8192, kMostSlices = 256;

// Width of the slices of a matrix with this many columns: a power of two.
inline std::int64_t slice_columns(std::int64_t total_columns) {
  std::int64_t width = kLeastSlice;
  while ((total_columns - 1) / kMostSlices >= width) width *= 2;
  return width;
}

// The first 14 significant bits of a number, of which the last is 1 wherever the rest was not 0. A conversion to
// float32 keeps them, and one to 16 bits then rounds as from the number itself: once.
inline constexpr std::int64_t kRest = (std::int64_t{1} << 39) - 1;
inline double with_14_bits(double x) {
  std::int64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = (bits | ((bits & kRest) + kRest)) & ~kRest;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

struct Layers {
  const std::int64_t* offsets;  // host, count + 1
  std::int64_t count;
  std::int64_t slice;  // width of a slice
};

// Integer counts of FedHEAL, one per parameter.
enum class CountType : int { u8, i16, i32 };

// The rows of common_descent beside their Gram matrices.
struct Descent {
  std::int64_t online;    // the first rows; those behind are remembered
  const double* weights;  // of the fair row, [online], or null: there is none
  double zero_row, zero_direction, rounding;
};

namespace cpu {

// Runs body(task, context) for every task in [0, tasks), on any threads, in any order.
using Body = void (*)(std::int64_t task, void* context);
using ParallelFor = void (*)(std::int64_t tasks, Body body, void* context);

// gram[l][i][j] = sum over the columns of layer l of rows[i] * rows[j]; [L, m, m].
void layer_gram(Matrix rows, Layers layers, double* gram, ParallelFor parallel);
// squares[l][i] = sum of rows[i] * rows[i]; [L, m]. A row's bits depend on no other row, and on no address.
void layer_squares(Matrix rows, Layers layers, double* squares, ParallelFor parallel);
// gram[l][i][j] = sum of rows[i] * others[j]; [L, m, h].
void layer_cross_gram(Matrix rows, Matrix others, Layers layers, double* gram, ParallelFor parallel);
// The same with `count` of the others only, which are listed: gram[l][i][j] = sum of rows[i] * others[chosen[j]].
void layer_chosen_gram(Matrix rows, Matrix others, const std::int64_t* chosen, std::int64_t count, Layers layers,
                       double* gram, ParallelFor parallel);
// dots[l][i] = sum of rows[i] * step; [L, m].
void layer_dots(Matrix rows, const void* step, Layers layers, double* dots, ParallelFor parallel);
// out[c] (+)= sum_i coeff[l][i] * rows[i][c] for the columns c of layer l; out has the rows' dtype.
void layer_combine(Matrix rows, Layers layers, const double* coeff, void* out, bool add, ParallelFor parallel);
// out[c] = sum_i coeff[l][i] * rows[i][c] + sum_j coeff[l][m + j] * others[j][c]; of the rows' dtype, which others
// have, too. Rows whose coefficient is 0 are not read.
void layer_cross_combine(Matrix rows, Matrix others, Layers layers, const double* coeff, void* out,
                         ParallelFor parallel);
// FedFV's sequential projection in coefficient space; gram and coeff are [batch, m, m].
void project_conflicts(const double* gram, std::int64_t batch, std::int64_t m, const std::int64_t* order,
                       const bool* keep, double* coeff, ParallelFor parallel);
// The shortest vector in the convex hull, from its Gram matrix; gram [batch, k, k], lam [batch, k], gap [batch].
void min_norm(const double* gram, std::int64_t batch, std::int64_t k, double* lam, double* gap, ParallelFor parallel);
// The shortest vector in the convex hull of scaled rows and a fair row; gram [batch, k, k], scale [batch, k] or null
// for equal lengths. Coefficients of the rows [batch, k], and [batch] whether it is a direction and has a fair row.
void common_descent(Descent descent, const double* gram, const double* scale, std::int64_t batch, std::int64_t k,
                    double* coeff, bool* solved, bool* fair, ParallelFor parallel);
// FedHEAL, pass 1: keep bits (ceil(n / 32) words), squared norms of the kept part per layer, counts updated in place.
void puc_track(Matrix row, void* counts, CountType type, std::int64_t threshold, std::int64_t participations,
               Layers layers, std::int32_t* keep, double* norms, ParallelFor parallel);
// FedHEAL, pass 2: weighted mean over the rows whose bit is set; keep is [m, ceil(n / 32)].
void puc_combine(Matrix rows, const std::int32_t* keep, const double* weights, void* out, ParallelFor parallel);
// out[c] = mean of column c without its `trim` least and `trim` largest numbers, 2 trim < rows; NaN if one is NaN.
void trimmed_mean(Matrix rows, std::int64_t trim, void* out, ParallelFor parallel);
// The instruction set that the kernels of this process use: "avx512", "avx2", "sse2", "neon" or "generic".
const char* instruction_set();

}  // namespace cpu

namespace cuda {

// As above, with device pointers for everything but Layers; stream is a cudaStream_t. Scratch memory comes from
// allocate, which returns device memory that lives until the work queued on the stream is done.
struct Context {
  void* stream;
  void* (*allocate)(std::int64_t bytes, void* owner);
  void* owner;
};

// Copies numbers of the host to device memory, and has them before it returns. They travel as kernel arguments, which a
// launch copies: the host array may go at once, nothing waits for the device, and a captured graph holds the values. A
// cudaMemcpyAsync from pageable memory would have to wait for the stream, and a captured one would read the host array
// at every replay. For some thousands of numbers: one launch takes 3584 bytes.
void copy_in(const char* op, const void* host, std::int64_t bytes, void* to, Context context);

void layer_gram(Matrix rows, Layers layers, double* gram, Context context);
void layer_squares(Matrix rows, Layers layers, double* squares, Context context);
void layer_cross_gram(Matrix rows, Matrix others, Layers layers, double* gram, Context context);
void layer_dots(Matrix rows, const void* step, Layers layers, double* dots, Context context);
void layer_combine(Matrix rows, Layers layers, const double* coeff, void* out, bool add, Context context);
// Added to an out of any dtype.
void layer_combine_mixed(Matrix rows, Layers layers, const double* coeff, void* out, DType type, Context context);
void layer_cross_combine(Matrix rows, Matrix others, Layers layers, const double* coeff, void* out, Context context);
void project_conflicts(const double* gram, std::int64_t batch, std::int64_t m, const std::int64_t* order,
                       const bool* keep, double* coeff, Context context);
void min_norm(const double* gram, std::int64_t batch, std::int64_t k, double* lam, double* gap, Context context);
void common_descent(Descent descent, const double* gram, const double* scale, std::int64_t batch, std::int64_t k,
                    double* coeff, bool* solved, bool* fair, Context context);
void puc_track(Matrix row, void* counts, CountType type, std::int64_t threshold, std::int64_t participations,
               Layers layers, std::int32_t* keep, double* norms, Context context);
void puc_combine(Matrix rows, const std::int32_t* keep, const double* weights, void* out, Context context);
// A block holds whole columns: at most 6144 rows in float64, and twice as many in other types.
void trimmed_mean(Matrix rows, std::int64_t trim, void* out, Context context);

}  // namespace cuda
}  // namespace fl_lightning
