// SPDX-License-Identifier: Apache-2.0
#include "device/device.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "project_conflicts";
constexpr int kWarps = kProjectThreads / kWarp;

// Of one matrix.
__host__ __device__ inline std::int64_t blocks_of(std::int64_t m) { return (m + kWarps - 1) / kWarps; }

// One warp carries out one update's projections; products holds those of the projected update with all originals.
template <class Products>
__device__ inline void project(const double* gram, int m, const std::int64_t* order, bool keep, int i,
                               Products products, double* coeff) {
  const int lane = threadIdx.x % kWarp;
  for (int k = lane; k < m; k += kWarp) {
    products[k] = gram[std::int64_t{i} * m + k];
    coeff[k] = k == i ? 1.0 : 0.0;
  }
  __syncwarp();
  for (int position = 0; position < m && !keep; ++position) {
    const std::int64_t j = order[position];
    if (j == i) continue;
    const bool known = j >= 0 && j < m;  // an order on the device is not checked: NaN, and no stray access
    double square = NAN, dot = NAN;
    if (known) square = gram[j * m + j];
    if (known) dot = products[j];
    // Not (dot >= 0) instead of dot < 0: a NaN product must show in the result, not count as "no conflict".
    if (dot >= 0.0 || square <= 0.0) continue;
    const double share = dot / square;
    const double* row = gram + (known ? j * m : 0);
    __syncwarp();
    for (int k = lane; k < m; k += kWarp) {
      // The product is rounded, as on the processor: the sign of what is left decides.
      products[k] = products[k] - __dmul_rn(share, row[k]);
      if (k == j || !known) coeff[k] -= share;
    }
    __syncwarp();
  }
}

// One warp per row, which depends on no other: a matrix has as many blocks as its rows take.
template <bool kShared>
__global__ void __launch_bounds__(kProjectThreads, kProjectBlocks)
    project_all(const double* grams, int m, const std::int64_t* order, const bool* keep, double* coeffs,
                double* scratch) {
  const std::int64_t blocks = blocks_of(m), matrix = blockIdx.x / blocks * m * m;
  const int warp = threadIdx.x / kWarp;
  const int i = static_cast<int>(blockIdx.x % blocks) * kWarps + warp;
  if (i >= m) return;
  double* coeff = coeffs + matrix + std::int64_t{i} * m;
  if constexpr (kShared) {
    SHARED(double, products, kWarps* kProjectRows);
    project(grams + matrix, m, order, keep[i], i, products + warp * m, coeff);
  } else {
    project(grams + matrix, m, order, keep[i], i, scratch + matrix + std::int64_t{i} * m, coeff);
  }
}

}  // namespace

void project_conflicts(const double* gram, std::int64_t batch, std::int64_t m, const std::int64_t* order,
                       const bool* keep, double* coeff, Context context) {
  const bool small = m <= kProjectRows;
  double* products = small ? nullptr : scratch<double>(context, batch * m * m);
  launch(kOp, small ? project_all<true> : project_all<false>, batch * blocks_of(m), kProjectThreads, context, gram,
         static_cast<int>(m), order, keep, coeff, products);
}

}  // namespace fl_lightning::cuda
