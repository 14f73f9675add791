// SPDX-License-Identifier: Apache-2.0
// The point of least norm in a convex hull: P. Wolfe's method (Mathematical Programming 11, 1976) on one symmetric
// tableau, the bordered matrix [[G, 1], [1', 0]] swept on the support and the border. Part of min_norm_kernel.h.
//
// fl_lightning/ops/_active_set.py explains the tableau and the rules; the moves here are the same. The tableau's border
// and diagonal are kept apart, as vectors. All vectors are filled up with zeros to whole blocks.
#include "packed_kernel.h"

namespace fl_lightning::cpu::FL_ISA {

inline constexpr double kInfinity = __builtin_inf();
inline constexpr int kVectors = 12;

FL_INLINE double larger(double a, double b) { return a > b ? a : b; }
FL_INLINE double smaller(double a, double b) { return a < b ? a : b; }
FL_INLINE Doubles larger(Doubles a, Doubles b) { return a > b ? a : b; }

struct Search {
  std::int64_t k, n;  // rows, and with those that fill up the last block
  Packed gram, tableau;
  double* own;  // the diagonal of the Gram matrix, without a ridge
  double *lam, *norm, *square, *member, *border, *distance, *column, *scaled, *y, *product, *work, *sums;

  Search(std::int64_t k, std::int64_t n, double* numbers)
      : k(k), n(n), gram{numbers, n}, tableau{numbers + Packed::size(n), n} {
    double* next = numbers + 2 * Packed::size(n);
    double** const vectors[kVectors] = {&own,      &lam,    &norm,   &square, &member,  &border,
                                        &distance, &column, &scaled, &y,      &product, &work};
    for (double** vector : vectors) {
      *vector = next;
      for (std::int64_t i = 0; i < n; ++i) next[i] = 0.0;
      next += n;
    }
    sums = next;
  }

  FL_INLINE Doubles chosen(std::int64_t i, Doubles inside, Doubles outside) const {
    return load(member + i) > broadcast(0.0) ? inside : outside;
  }

  void add_ridge(double ridge) const {
    for (std::int64_t i = 0; i < k; ++i) gram.diagonal(i) = own[i] + ridge;
  }

  std::int64_t shortest() const {
    std::int64_t first = 0;
    for (std::int64_t i = 1; i < k; ++i) first = square[i] < square[first] ? i : first;
    return first;
  }

  // Starts from the shortest row: the differences to it lose the least accuracy.
  void start() const {
    for (std::int64_t i = 0; i < k; ++i) {
      square[i] = larger(gram.diagonal(i), 0.0);
      norm[i] = __builtin_sqrt(square[i]);
    }
    const std::int64_t first = shortest();
    const double mu = square[first];
    gram.column(first, column);
    for (std::int64_t i = 0; i < n; ++i) {
      lam[i] = member[i] = i == first ? 1.0 : 0.0;
      border[i] = i < k ? column[i] - mu : 0.0;
      scaled[i] = i < k ? 1.0 : 0.0;
    }
    const double* from = gram.data;
    double* to = tableau.data;
    for (std::int64_t i = 0; i < n; i += kDoubles) {
      const Doubles rows = load(column + i), real = load(scaled + i);
      for (std::int64_t j = i; j < n; ++j, from += kDoubles, to += kDoubles) {
        store(to, (load(from) - rows - broadcast(border[j])) * (real * broadcast(scaled[j])));
      }
    }
    for (std::int64_t i = 0; i < n; ++i) distance[i] = tableau.diagonal(i);
    distance[first] = scaled[first] = 0.0;
    border[first] = -1.0;
    tableau.set_column(first, scaled);
  }

  // Towards the minimiser of the affine hull, as far as the simplex allows: the member that reaches zero, or -1.
  std::int64_t approach() const {
    const Doubles zero = broadcast(0.0), infinity = broadcast(kInfinity);
    Minimum lowest(work);
    for (std::int64_t i = 0; i < n; i += kDoubles) {
      const Doubles target = zero - load(border + i);
      store(y + i, chosen(i, target, zero));
      lowest.put(i, chosen(i, target, infinity));
    }
    if (lowest.value() > 0.0) return reach(1.0, -1);
    Minimum ratio(work);
    for (std::int64_t i = 0; i < n; i += kDoubles) {
      const Doubles target = load(y + i), old = load(lam + i), fall = old - target;
      ratio.put(i, chosen(i, target <= zero ? (fall > zero ? old / fall : zero) : infinity, infinity));
    }
    const double length = ratio.value();
    return length < kInfinity ? reach(smaller(length, 1.0), ratio.index(length)) : reach(1.0, -1);
  }

  std::int64_t reach(double length, std::int64_t drop) const {
    for (std::int64_t i = 0; i < n; i += kDoubles) {
      const Doubles target = load(y + i), old = load(lam + i), zero = broadcast(0.0);
      store(lam + i, drop < 0 ? target : larger(old - broadcast(length) * (old - target), zero));
    }
    if (drop >= 0) lam[drop] = 0.0;
    return drop;
  }

  // The row whose line from here would lower the objective most; or -1.
  std::int64_t entering() const {
    const Doubles zero = broadcast(0.0), infinity = broadcast(kInfinity), dependent = broadcast(kDependent);
    const double length = dot(lam, norm, n);
    Minimum loss(work);
    for (std::int64_t i = 0; i < n; i += kDoubles) {
      const Doubles slack = load(border + i);
      const Doubles noise = broadcast(kSlack * length) * (load(norm + i) + broadcast(length));
      const Doubles pivot = larger(load(distance + i), larger(dependent * load(square + i), broadcast(kTiny)));
      loss.put(i, chosen(i, infinity, slack < zero - noise ? zero - slack * slack / pivot : infinity));
    }
    const double best = loss.value();
    return best < kInfinity ? loss.index(best) : -1;
  }

  // Lets the weight of a row grow until a member's reaches zero, if that comes first: that member, or -1.
  std::int64_t exchanged(std::int64_t add) const {
    const Doubles zero = broadcast(0.0), infinity = broadcast(kInfinity);
    Minimum ratio(work);
    tableau.column(add, column);
    for (std::int64_t i = 0; i < n; i += kDoubles) {
      const Doubles share = load(column + i);
      ratio.put(i, chosen(i, share > broadcast(kShare) ? load(lam + i) / share : infinity, infinity));
    }
    const double room = ratio.value();
    const double wanted = distance[add] > kDependent * square[add] ? -border[add] / distance[add] : kInfinity;
    if (!(room < wanted)) return -1;
    const std::int64_t drop = ratio.index(room);
    for (std::int64_t i = 0; i < n; i += kDoubles) {
      const Doubles share = chosen(i, load(column + i), zero);
      store(lam + i, larger(load(lam + i) - broadcast(room) * share, zero));
    }
    lam[add] = room;
    lam[drop] = 0.0;
    return drop;
  }

  // Brings a row, whose column of the tableau is in column, into the support, or takes it out when it is in.
  void sweep(std::int64_t p) const {
    const bool leaving = member[p] != 0.0;
    const double floor = kFloor * larger(square[p], kTiny);
    const double pivot = leaving ? smaller(distance[p], -1e-300) : larger(distance[p], floor);
    const double edge = border[p] / pivot;
    for (std::int64_t i = 0; i < n; i += kDoubles) {
      const Doubles own = load(column + i), part = own / broadcast(pivot), minus = broadcast(0.0) - own;
      store(column + i, minus);
      store(scaled + i, part);
      store(distance + i, multiply_add(minus, part, load(distance + i)));
      store(border + i, multiply_add(minus, broadcast(edge), load(border + i)));
    }
    tableau.add_outer(column, scaled);
    for (std::int64_t i = 0; leaving && i < n; i += kDoubles) store(scaled + i, broadcast(0.0) - load(scaled + i));
    scaled[p] = distance[p] = -1.0 / pivot;
    border[p] = leaving ? -edge : edge;
    tableau.set_column(p, scaled);
    member[p] = leaving ? 0.0 : 1.0;
  }

  // product = G y, and the squared norm of the combination y, whose coefficients add up to total.
  double square_of_y(double& total) const {
    gram.multiply(y, product, sums);
    total = sum_of(y, n);
    return dot(product, y, n) / total;
  }

  // Recomputes the border from the Gram matrix, by iterative refinement with the swept inverse.
  void refine() const {
    const Doubles zero = broadcast(0.0);
    double total;
    for (std::int64_t i = 0; i < n; i += kDoubles) store(y + i, chosen(i, zero - load(border + i), zero));
    for (int round = 0; round < kRefinements; ++round) {
      const Doubles mu = broadcast(square_of_y(total)), lacking = broadcast(1.0 - total);
      for (std::int64_t i = 0; i < n; i += kDoubles) store(work + i, chosen(i, mu - load(product + i), zero));
      tableau.multiply(work, column, sums);
      for (std::int64_t i = 0; i < n; i += kDoubles) {
        const Doubles refined = load(y + i) - load(column + i) - load(border + i) * lacking;
        store(y + i, chosen(i, refined, zero));
      }
    }
    const Doubles mu = broadcast(square_of_y(total));
    for (std::int64_t i = 0; i < n; i += kDoubles) {
      store(border + i, chosen(i, zero - load(y + i), load(product + i) - mu));
    }
    for (std::int64_t i = k; i < n; ++i) border[i] = 0.0;
  }

  // Leaves a point of the simplex in lam. The cap is for indefinite matrices, where the objective need not fall.
  void run() const {
    start();
    bool fresh = false;  // the border was refined since the last move
    for (std::int64_t count = 0; count < 5 * k + 50; ++count) {
      std::int64_t drop = approach(), add = -1;
      if (drop < 0) add = entering();
      if (add >= 0) drop = exchanged(add);
      if (drop >= 0) {
        tableau.column(drop, column);
        sweep(drop);
        if (add >= 0) tableau.column(add, column);
      }
      if (add >= 0) sweep(add);
      const bool settled = drop < 0 && add < 0;
      if (settled && fresh) break;
      if (settled) refine();
      fresh = settled;
    }
    const double total = sum_of(lam, n);
    const bool lost = !(total > 0.0 && total < kInfinity);
    const std::int64_t instead = lost ? shortest() : -1;
    for (std::int64_t i = 0; i < k; ++i) lam[i] = !lost ? lam[i] / total : i == instead ? 1.0 : 0.0;
  }

  // max_j (lam' G lam - (G lam)_j), at least 0.
  double excess() const {
    gram.multiply(lam, product, sums);
    double least = kInfinity;
    for (std::int64_t i = 0; i < k; ++i) least = smaller(product[i], least);
    return larger(dot(lam, product, n) - least, 0.0);
  }
};

}  // namespace fl_lightning::cpu::FL_ISA
