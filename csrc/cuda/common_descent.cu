// SPDX-License-Identifier: Apache-2.0
#include "kernels/nearest_point.cuh"

namespace fl_lightning::cuda {
namespace {

constexpr const char* kOp = "common_descent";
constexpr int kVectors = 6;  // the last one of integers

// Memory of one matrix of k rows: vectors, and the Gram matrix of the hull with the fair row.
__host__ __device__ inline std::int64_t room_size(std::int64_t k) { return kVectors * (k + 1) + (k + 1) * (k + 1); }

struct Problem {
  int k, online;
  const double* gram;
  double *norm, *scale, *fair, *product, *lam, *hull;
  int* place;

  __device__ Problem(int k, int online, const double* gram, double* room) : k(k), online(online), gram(gram) {
    double** const vectors[kVectors - 1] = {&norm, &scale, &fair, &product, &lam};
    for (int v = 0; v < kVectors - 1; ++v) *vectors[v] = room + v * (k + 1);
    place = reinterpret_cast<int*>(room + (kVectors - 1) * (k + 1));
    hull = room + kVectors * (k + 1);
  }

  // product = G x. Needs the barrier before and has one behind.
  __device__ void multiply(const double* x) const {
    for (int i = threadIdx.x / kWarp; i < k; i += blockDim.x / kWarp) {
      const double total = sum_of(k, [&](int j) { return gram[i * k + j] * x[j]; });
      if (threadIdx.x % kWarp == 0) product[i] = total;
    }
    __syncthreads();
  }

  // The lower median of the online lengths that are not 0; infinity if all are. One thread finds it.
  template <class Found>
  __device__ void find_median(Found found) const {
    const int count = static_cast<int>(sum_of(online, [&](int i) { return norm[i] != 0.0 ? 1.0 : 0.0; }));
    if (threadIdx.x == 0 && count == 0) found[0] = INFINITY;
    for (int i = threadIdx.x; i < online; i += blockDim.x) {
      if (norm[i] == 0.0) continue;
      int before = 0;
      for (int j = 0; j < online; ++j) {
        before += norm[j] != 0.0 && (norm[j] < norm[i] || (norm[j] == norm[i] && j < i));
      }
      if (before == (count - 1) / 2) found[0] = norm[i];
    }
    __syncthreads();
  }

  // Rows that count as long as the mean of those that are online, which it returns.
  template <class Found>
  __device__ double equal_lengths(double zero_row, Found found) const {
    find_median(found);
    const double least = zero_row * found[0];
    const double count = sum_of(online, [&](int i) { return norm[i] > least ? 1.0 : 0.0; });
    const double mean = sum_of(online, [&](int i) { return norm[i] > least ? norm[i] : 0.0; }) / fmax(count, 1.0);
    for (int i = threadIdx.x; i < k; i += blockDim.x) scale[i] = norm[i] > least ? mean / norm[i] : 0.0;
    __syncthreads();
    return mean;
  }

  // Coefficients of the fair row; whether there is one. Leaves G times them in product.
  __device__ bool add_fair_row(const Descent& descent, bool equal, double mean) const {
    const double* weights = descent.weights;
    for (int i = threadIdx.x; i < k; i += blockDim.x) fair[i] = weights && i < online ? weights[i] * scale[i] : 0.0;
    __syncthreads();
    if (!weights) return false;
    multiply(fair);
    if (equal) {
      const double length = sqrt(fmax(sum_of(k, [&](int i) { return fair[i] * product[i]; }), 0.0));
      const double size = sqrt(sum_of(online, [&](int i) { return weights[i] * weights[i]; }));
      const double factor = length > descent.zero_direction * size * mean ? mean / length : 0.0;
      __syncthreads();  // every warp has read what changes now
      for (int i = threadIdx.x; i < k; i += blockDim.x) {
        fair[i] *= factor;
        product[i] *= factor;
      }
      __syncthreads();
    }
    return sum_of(online, [&](int i) { return fair[i] != 0.0 ? 1.0 : 0.0; }) > 0.0;
  }

  // The Gram matrix of the rows that are left, and of the fair row behind them, scaled; how many these are, or -1 where
  // a number is not finite.
  __device__ int make_hull(bool with_fair_row) const {
    const int some = static_cast<int>(sum_of(k, [&](int i) { return scale[i] != 0.0 ? 1.0 : 0.0; }));
    const int rows = some + with_fair_row;
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
      int before = 0;
      for (int j = 0; j < i; ++j) before += scale[j] != 0.0;
      place[i] = before;
    }
    const double corner = with_fair_row ? sum_of(k, [&](int i) { return fair[i] * product[i]; }) : 0.0;
    const double squares = sum_of(k, [&](int i) { return gram[i * k + i] * scale[i] * scale[i]; });
    const int exponent = power_of_two((squares + corner) / rows).exponent;
    __syncthreads();
    int bad = 0;
    for (int e = threadIdx.x; e < k * k; e += blockDim.x) {
      const int i = e / k, j = e % k;
      if (scale[i] == 0.0 || scale[j] == 0.0) continue;
      const double own = ldexp((0.5 * gram[e] + 0.5 * gram[j * k + i]) * scale[i] * scale[j], exponent);
      bad |= !isfinite(own);
      hull[place[i] * rows + place[j]] = own;
    }
    for (int i = threadIdx.x; i < k && with_fair_row; i += blockDim.x) {
      if (scale[i] == 0.0) continue;
      const int own = place[i];
      const double cross = ldexp(scale[i] * product[i], exponent);
      bad |= !isfinite(cross);
      hull[own * rows + some] = cross;
      hull[some * rows + own] = cross;
    }
    if (threadIdx.x == 0 && with_fair_row) hull[some * rows + some] = ldexp(corner, exponent);
    bad |= !isfinite(corner);
    return __syncthreads_or(bad) ? -1 : rows;
  }

  // Whether the direction is long enough, and falls for everybody by more than rounding can turn around.
  __device__ bool holds(const Descent& descent, const double* coeff, double live) const {
    multiply(coeff);
    const double squares = sum_of(online, [&](int i) { return scale[i] * norm[i] * (scale[i] * norm[i]); });
    const double size = sum_of(k, [&](int i) { return fabs(coeff[i]) * norm[i]; });
    const double square = sum_of(k, [&](int i) { return coeff[i] * product[i]; });
    int stays = !(square > descent.zero_direction * descent.zero_direction * squares / live);
    for (int i = threadIdx.x; i < online; i += blockDim.x) {
      stays |= scale[i] != 0.0 && !(product[i] > descent.rounding * norm[i] * size);
    }
    return !__syncthreads_or(stays);
  }
};

// One block per matrix.
template <bool kShared>
__global__ void __launch_bounds__(kSearchThreads, 1)
    descend(const Descent descent, const double* grams, const double* scales, int k, double* rooms, double* numbers,
            double* coeffs, bool* solved, bool* fairs) {
  const std::int64_t matrix = blockIdx.x;
  const double *gram = grams + matrix * k * k, *given = scales ? scales + matrix * k : nullptr;
  double* coeff = coeffs + matrix * k;
  const Problem problem(k, static_cast<int>(descent.online), gram, rooms + matrix * room_size(k));
  int bad = 0;
  for (int e = threadIdx.x; e < k * k; e += blockDim.x) bad |= !isfinite(gram[e]);
  for (int i = threadIdx.x; i < k; i += blockDim.x) {
    bad |= given && !isfinite(given[i]);
    bad |= descent.weights && i < problem.online && !isfinite(descent.weights[i]);
    problem.norm[i] = sqrt(fmax(gram[i * k + i], 0.0));
    problem.scale[i] = given ? given[i] : 0.0;
  }
  bool with_fair_row = false;
  double live = 0.0;
  int rows = -1;
  SHARED(double, median, 1);
  if (!__syncthreads_or(bad)) {
    const double mean = given ? 0.0 : problem.equal_lengths(descent.zero_row, +median);
    with_fair_row = problem.add_fair_row(descent, !given, mean);
    live = sum_of(problem.online, [&](int i) { return problem.scale[i] != 0.0 ? 1.0 : 0.0; });
    rows = live > 0.0 ? problem.make_hull(with_fair_row) : 0;
  }
  if (rows <= 0) {
    for (int i = threadIdx.x; i < k; i += blockDim.x) coeff[i] = rows < 0 ? NAN : 0.0;
    if (threadIdx.x == 0) solved[matrix] = rows == 0;
    if (threadIdx.x == 0) fairs[matrix] = with_fair_row;
    return;
  }
  SHARED(int, moves, 4);
  double* const room = kShared ? nullptr : numbers + matrix * search_size(k + 1);
  nearest_point<kShared>(rows, problem.hull, room, +moves, problem.lam);
  for (int i = threadIdx.x; i < k; i += blockDim.x) {
    const double share = problem.scale[i] == 0.0 ? 0.0 : problem.lam[problem.place[i]];
    coeff[i] = problem.scale[i] * share + (with_fair_row ? problem.lam[rows - 1] * problem.fair[i] : 0.0);
  }
  __syncthreads();
  const bool holds = problem.holds(descent, coeff, live);
  if (threadIdx.x == 0) solved[matrix] = holds;
  if (threadIdx.x == 0) fairs[matrix] = with_fair_row;
}

}  // namespace

void common_descent(Descent descent, const double* gram, const double* scale, std::int64_t batch, std::int64_t k,
                    double* coeff, bool* solved, bool* fair, Context context) {
  if (k >= 32767) {
    throw std::runtime_error("fl_lightning::common_descent takes up to 32766 rows, found " + std::to_string(k));
  }
  const auto [threads, bytes] = search_shape(k + 1);
  double* rooms = scratch<double>(context, batch * room_size(k));
  double* numbers = bytes ? nullptr : scratch<double>(context, batch * search_size(k + 1));
  launch_with_shared(kOp, bytes ? descend<true> : descend<false>, batch, threads, bytes, context, descent, gram, scale,
                     static_cast<int>(k), rooms, numbers, coeff, solved, fair);
}

}  // namespace fl_lightning::cuda
