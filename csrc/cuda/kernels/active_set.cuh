// SPDX-License-Identifier: Apache-2.0
// The point of least norm in a convex hull, by one block: P. Wolfe's method (Mathematical Programming 11, 1976) on one
// symmetric tableau, the bordered matrix [[G, 1], [1', 0]] swept on the support and the border.
//
// fl_lightning/ops/_active_set.py explains the tableau and the rules; the moves here are the same. The first warp
// chooses a move from vectors of k numbers, the block sweeps (k + 1)^2 numbers.
#pragma once

#include "../../active_set.h"
#include "../device/device.cuh"

namespace fl_lightning::cuda {

constexpr int kVectors = 8;

// Numbers that a search of k rows works on.
__host__ __device__ inline std::int64_t search_size(std::int64_t k) { return (k + 1) * (k + 1) + kVectors * (k + 1); }

// What the first warp tells the block: the rows to sweep out and in (-1: none), and whether to refine or stop.
struct Move {
  int drop, add, refine, done;
};

// Storage is a pointer to doubles, in shared memory where they fit; moves is a shared array of 4 ints.
template <class Storage, class Moves>
struct Search {
  int k;
  const double* gram;  // [k, k], symmetric, scaled
  double ridge;        // added to its diagonal
  Storage tableau, lam, square, norm, member, y, product, column, scaled;
  Moves moves;
  bool fresh;  // the border was refined since the last move; the first warp alone knows

  __device__ Search(int k, const double* gram, Storage numbers, Moves moves)
      : k(k), gram(gram), ridge(0.0), tableau(numbers), moves(moves), fresh(false) {
    Storage* const vectors[kVectors] = {&lam, &square, &norm, &member, &y, &product, &column, &scaled};
    for (int v = 0; v < kVectors; ++v) *vectors[v] = numbers + ((k + 1) * (k + 1) + v * (k + 1));
  }

  __device__ double g(int i, int j) const { return gram[i * k + j] + (i == j ? ridge : 0.0); }
  __device__ int at(int row, int column) const { return row * (k + 1) + column; }
  __device__ static int lane() { return threadIdx.x % kWarp; }

  template <class Term>
  __device__ double sum(Term term) const {
    return sum_of(k, term);
  }

  // product = G x (without the ridge where asked). Ends with a barrier.
  template <class Vector>
  __device__ void multiply(Vector x, bool ridged) {
    for (int i = threadIdx.x / kWarp; i < k; i += blockDim.x / kWarp) {
      const double total = sum([&](int j) { return (ridged ? g(i, j) : gram[i * k + j]) * x[j]; });
      if (lane() == 0) product[i] = total;
    }
    __syncthreads();
  }

  __device__ int shortest() const {
    Best best = {INFINITY, 0};
    for (int i = lane(); i < k; i += kWarp) {
      const double own = fmax(g(i, i), 0.0);
      if (own < best.value) best = {own, i};
    }
    return least(best).index;
  }

  // Starts from the shortest row: the differences to it lose the least accuracy.
  __device__ void start() {
    const int first = shortest();
    const double mu = fmax(g(first, first), 0.0);
    for (int e = threadIdx.x; e < (k + 1) * (k + 1); e += blockDim.x) {
      const int i = e / (k + 1), j = e % (k + 1);
      if (i == first || j == first) {
        tableau[e] = i == j ? 0.0 : i == k || j == k ? -1.0 : 1.0;
      } else if (i < k && j < k) {
        tableau[e] = g(i, j) - g(first, j) - g(first, i) + mu;
      } else {
        tableau[e] = i == j ? mu : g(first, i < k ? i : j) - mu;
      }
    }
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
      square[i] = fmax(g(i, i), 0.0);
      norm[i] = sqrt(fmax(g(i, i), 0.0));
      member[i] = i == first ? 1.0 : 0.0;
      lam[i] = i == first ? 1.0 : 0.0;
    }
    fresh = false;
    __syncthreads();
  }

  // One move, chosen by the first warp.
  __device__ void choose() {
    Move move = {-1, -1, 0, 0};
    // Towards the minimiser of the affine hull, as far as the simplex allows.
    Best drop = {INFINITY, k};
    for (int i = lane(); i < k; i += kWarp) {
      const double target = -tableau[at(i, k)], fall = lam[i] - target;
      if (member[i] == 0.0 || !(target <= 0.0)) continue;
      const double ratio = fall > 0.0 ? lam[i] / fall : 0.0;
      if (ratio < drop.value) drop = {ratio, i};
    }
    drop = least(drop);
    const bool blocked = drop.value < INFINITY;
    const double length = fmin(drop.value, 1.0);
    for (int i = lane(); i < k; i += kWarp) {
      const double target = member[i] == 0.0 ? 0.0 : -tableau[at(i, k)], own = lam[i];
      lam[i] = blocked ? own - length * (own - target) : target;
    }
    if (blocked) {
      move.drop = drop.index;
    } else {
      enter(move);
    }
    const bool moved = move.drop >= 0 || move.add >= 0;
    for (int i = lane(); i < k && moved; i += kWarp) {
      const double own = lam[i];
      lam[i] = i == move.drop ? 0.0 : fmax(own, 0.0);
    }
    move.done = !moved && fresh;
    move.refine = !moved && !fresh;
    fresh = !moved;
    if (lane() == 0) {
      moves[0] = move.drop;
      moves[1] = move.add;
      moves[2] = move.refine;
      moves[3] = move.done;
    }
  }

  // The row whose line from here would lower the objective most; or nothing.
  __device__ void enter(Move& move) {
    const double length = sum([&](int i) { return lam[i] * norm[i]; });
    Best best = {1.0, k};
    for (int i = lane(); i < k; i += kWarp) {
      const double slack = tableau[at(k, i)], noise = kSlack * length * (norm[i] + length);
      if (member[i] != 0.0 || !(slack < -noise)) continue;
      const double gain = slack * slack / fmax(tableau[at(i, i)], kDependent * square[i]);
      if (-gain < best.value) best = {-gain, i};
    }
    best = least(best);
    if (best.index >= k) return;
    const int add = best.index;
    // How far its weight can grow before a member's reaches zero.
    Best room = {INFINITY, k};
    for (int i = lane(); i < k; i += kWarp) {
      const double share = tableau[at(i, add)];
      if (member[i] == 0.0 || !(share > kShare)) continue;
      if (lam[i] / share < room.value) room = {lam[i] / share, i};
    }
    room = least(room);
    const double distance = tableau[at(add, add)], slack = tableau[at(k, add)];
    const double wanted = distance > kDependent * square[add] ? -slack / distance : INFINITY;
    move.add = add;
    if (!(room.value < wanted)) return;
    move.drop = room.index;
    for (int i = lane(); i < k; i += kWarp) {
      const double own = lam[i], share = member[i] == 0.0 ? 0.0 : tableau[at(i, add)];
      lam[i] = i == add ? room.value : own - room.value * share;
    }
  }

  // Brings a row into the support, or takes it out when it is in.
  __device__ void sweep(int p) {
    const bool leaving = member[p] != 0.0;
    double pivot = tableau[at(p, p)];
    pivot = leaving ? fmin(pivot, -1e-300) : fmax(pivot, kFloor * fmax(square[p], kTiny));
    for (int i = threadIdx.x; i <= k; i += blockDim.x) {
      const double own = tableau[at(i, p)];
      column[i] = own;
      scaled[i] = own / pivot;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < (k + 1) * (k + 1); e += blockDim.x) {
      const int i = e / (k + 1), j = e % (k + 1);
      if (i == p && j == p) {
        tableau[e] = -1.0 / pivot;
      } else if (i == p || j == p) {
        const double own = scaled[i == p ? j : i];
        tableau[e] = leaving ? -own : own;
      } else {
        tableau[e] = tableau[e] - column[i] * scaled[j];
      }
    }
    if (threadIdx.x == 0) member[p] = leaving ? 0.0 : 1.0;
    __syncthreads();
  }

  // Recomputes the border from the Gram matrix, by iterative refinement with the swept inverse.
  __device__ void refine() {
    for (int i = threadIdx.x; i < k; i += blockDim.x) y[i] = member[i] == 0.0 ? 0.0 : -tableau[at(i, k)];
    __syncthreads();
    for (int round = 0; round < kRefinements; ++round) {
      multiply(y, true);
      const double total = sum([&](int i) { return y[i]; });
      const double mu = sum([&](int i) { return product[i] * y[i]; }) / total;
      for (int i = threadIdx.x / kWarp; i < k; i += blockDim.x / kWarp) {
        if (member[i] == 0.0) continue;
        const double change =
            sum([&](int j) { return member[j] == 0.0 ? 0.0 : tableau[at(i, j)] * (mu - product[j]); });
        if (lane() == 0) column[i] = y[i] - change - tableau[at(i, k)] * (1.0 - total);
      }
      __syncthreads();
      for (int i = threadIdx.x; i < k; i += blockDim.x) y[i] = member[i] == 0.0 ? 0.0 : column[i];
      __syncthreads();
    }
    multiply(y, true);
    const double mu = sum([&](int i) { return product[i] * y[i]; }) / sum([&](int i) { return y[i]; });
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
      const double own = member[i] == 0.0 ? product[i] - mu : -y[i];
      tableau[at(i, k)] = own;
      tableau[at(k, i)] = own;
    }
    if (threadIdx.x == 0) tableau[at(k, k)] = mu;
    __syncthreads();
  }

  // Leaves a point of the simplex in lam. The cap is for indefinite matrices, where the objective need not fall.
  __device__ void run(double added) {
    ridge = added;
    start();
    for (int count = 0; count < 5 * k + 50; ++count) {
      if (threadIdx.x < kWarp) choose();
      __syncthreads();
      const int drop = moves[0], add = moves[1], refining = moves[2], done = moves[3];
      if (done) break;  // everything else ends with a barrier
      if (drop >= 0) sweep(drop);
      if (add >= 0) sweep(add);
      if (refining) refine();
    }
    const double total = sum([&](int i) { return lam[i]; });
    const int instead = isfinite(total) && total > 0.0 ? -1 : shortest();
    __syncthreads();
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
      lam[i] = instead < 0 ? lam[i] / total : i == instead ? 1.0 : 0.0;
    }
    __syncthreads();
  }

  // max_j (lam' G lam - (G lam)_j) for the matrix without a ridge, at least 0.
  __device__ double excess() {
    multiply(lam, false);
    const double value = sum([&](int i) { return lam[i] * product[i]; });
    Best low = {INFINITY, 0};
    for (int i = lane(); i < k; i += kWarp) {
      if (product[i] < low.value) low = {product[i], i};
    }
    return fmax(value - least(low).value, 0.0);
  }
};

}  // namespace fl_lightning::cuda
