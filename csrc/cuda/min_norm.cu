// SPDX-License-Identifier: Apache-2.0
#include "kernels/nearest_point.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "min_norm";

// One block per matrix.
template <bool kShared>
__global__ void __launch_bounds__(kSearchThreads, 1)
    solve(const double* grams, int k, double* scaled, double* numbers, double* lams, double* gaps) {
  const std::int64_t matrix = blockIdx.x;
  const double* gram = grams + matrix * k * k;
  double *own = scaled + matrix * k * k, *lam = lams + matrix * k;
  int bad = 0;
  for (int e = threadIdx.x; e < k * k; e += blockDim.x) bad |= !isfinite(gram[e]);
  if (__syncthreads_or(bad)) {
    for (int i = threadIdx.x; i < k; i += blockDim.x) lam[i] = NAN;
    if (threadIdx.x == 0) gaps[matrix] = NAN;
    return;
  }
  // Scaled by a power of two; made exactly symmetric.
  const PowerOfTwo power = power_of_two(sum_of(k, [&](int i) { return gram[i * k + i] / k; }));
  for (int e = threadIdx.x; e < k * k; e += blockDim.x) {
    const int i = e / k, j = e % k;
    own[e] = 0.5 * ldexp(gram[e], power.exponent) + 0.5 * ldexp(gram[j * k + i], power.exponent);
  }
  __syncthreads();
  SHARED(int, moves, 4);
  double* const room = kShared ? nullptr : numbers + matrix * search_size(k);
  const double excess = nearest_point<kShared>(k, own, room, +moves, lam);
  if (threadIdx.x == 0) gaps[matrix] = excess / power.mean;
}

}  // namespace

void min_norm(const double* gram, std::int64_t batch, std::int64_t k, double* lam, double* gap, Context context) {
  if (k >= 32768) throw std::runtime_error("fl_lightning::min_norm takes up to 32767 rows, found " + std::to_string(k));
  const auto [threads, bytes] = search_shape(k);
  double* scaled = scratch<double>(context, batch * k * k);
  double* numbers = bytes ? nullptr : scratch<double>(context, batch * search_size(k));
  launch_with_shared(kOp, bytes ? solve<true> : solve<false>, batch, threads, bytes, context, gram, static_cast<int>(k),
                     scaled, numbers, lam, gap);
}

}  // namespace fl_lightning::cuda
