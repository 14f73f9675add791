// SPDX-License-Identifier: Apache-2.0
// The point of least norm in a convex hull: P. Wolfe's method (Mathematical Programming 11, 1976) on one symmetric
// tableau, the bordered matrix [[G, 1], [1', 0]] swept on the support and the border. Included once per instruction set
// by min_norm_kernel.h.
//
// fl_lightning/ops/_active_set.py explains the tableau and the rules; the moves here are the same. The tableau's border
// and diagonal are kept apart, as vectors.
namespace fl_lightning::cpu::FL_ISA {

inline constexpr double kInfinity = __builtin_inf();

FL_INLINE double larger(double a, double b) { return a > b ? a : b; }
FL_INLINE double smaller(double a, double b) { return a < b ? a : b; }

// The rows to sweep out and in (-1: none), and whether to refine or stop.
struct Move {
  std::int64_t drop, add;
  bool refine, done;
};

struct Search {
  std::int64_t k, n;  // rows, and with those that fill up the last block
  Packed gram, tableau;
  double *own;  // the diagonal of the Gram matrix, without a ridge
  double *lam, *norm, *square, *member, *border, *distance, *column, *scaled, *y, *product, *work, *sums;
  bool fresh;  // the border was refined since the last move

  Search(std::int64_t k, std::int64_t n, double* numbers) : k(k), n(n), gram{numbers, n}, tableau{numbers + n * n, n} {
    double* next = numbers + 2 * n * n;
    double** const vectors[] = {&own,      &lam,    &norm,   &square, &member,  &border,
                                &distance, &column, &scaled, &y,      &product, &work};
    for (double** vector : vectors) {
      *vector = next;
      for (std::int64_t i = 0; i < n; ++i) next[i] = 0.0;
      next += n;
    }
    sums = next;
  }

  void add_ridge(double ridge) const {
    for (std::int64_t i = 0; i < k; ++i) gram.diagonal(i) = own[i] + ridge;
  }

  std::int64_t shortest() const {
    for (std::int64_t i = 0; i < n; ++i) work[i] = i < k ? square[i] : kInfinity;
    return least(work, n).index;
  }

  // Starts from the shortest row: the differences to it lose the least accuracy.
  void start() {
    for (std::int64_t i = 0; i < k; ++i) {
      square[i] = larger(gram.diagonal(i), 0.0);
      norm[i] = __builtin_sqrt(square[i]);
    }
    const std::int64_t first = shortest();
    const double mu = square[first];
    gram.column(first, column);
    for (std::int64_t i = 0; i < n; i += kDoubles) {
      const std::int64_t lanes = k - i < kDoubles ? k - i : kDoubles;
      for (std::int64_t j = i; j < n; ++j) {
        const double *from = gram.at(i, j), other = mu - column[j];
        double* to = tableau.at(i, j);
        for (std::int64_t r = 0; r < kDoubles; ++r) to[r] = r < lanes && j < k ? from[r] - column[i + r] + other : 0.0;
      }
    }
    for (std::int64_t i = 0; i < n; ++i) {
      const bool real = i < k, start = i == first;
      distance[i] = tableau.diagonal(i);
      border[i] = start ? -1.0 : real ? column[i] - mu : 0.0;
      scaled[i] = real && !start ? 1.0 : 0.0;
      lam[i] = member[i] = start ? 1.0 : 0.0;
    }
    distance[first] = 0.0;
    tableau.set_column(first, scaled);
    fresh = false;
  }

  // Towards the minimiser of the affine hull, as far as the simplex allows: the member that reaches zero, or -1.
  std::int64_t approach() {
    for (std::int64_t i = 0; i < n; ++i) {
      const double target = -border[i];
      work[i] = member[i] != 0.0 ? target : kInfinity;
      y[i] = member[i] != 0.0 ? target : 0.0;
    }
    if (!(least(work, n).value > 0.0)) {
      for (std::int64_t i = 0; i < n; ++i) {
        const double fall = lam[i] - y[i];
        work[i] = member[i] != 0.0 && y[i] <= 0.0 ? (fall > 0.0 ? lam[i] / fall : 0.0) : kInfinity;
      }
      const Best drop = least(work, n);
      if (drop.value < kInfinity) {
        const double length = smaller(drop.value, 1.0);
        for (std::int64_t i = 0; i < n; ++i) lam[i] = larger(lam[i] - length * (lam[i] - y[i]), 0.0);
        lam[drop.index] = 0.0;
        return drop.index;
      }
    }
    for (std::int64_t i = 0; i < n; ++i) lam[i] = y[i];
    return -1;
  }

  // The row whose line from here would lower the objective most; or -1.
  std::int64_t entering() const {
    const double length = dot(lam, norm, n);
    for (std::int64_t i = 0; i < n; ++i) {
      const double slack = border[i], noise = kSlack * length * (norm[i] + length);
      const double gain = slack * slack / larger(distance[i], larger(kDependent * square[i], kTiny));
      work[i] = member[i] == 0.0 && slack < -noise ? -gain : 1.0;
    }
    const Best best = least(work, n);
    return best.value <= 0.0 ? best.index : -1;
  }

  // How far the weight of a row can grow before a member's reaches zero: that member, if it comes to this, or -1.
  std::int64_t exchanged(std::int64_t add) {
    tableau.column(add, column);
    for (std::int64_t i = 0; i < n; ++i) {
      const double share = column[i];
      work[i] = member[i] != 0.0 && share > kShare ? lam[i] / share : kInfinity;
    }
    const Best room = least(work, n);
    const bool distant = distance[add] > kDependent * square[add];
    const double wanted = distant ? -border[add] / distance[add] : kInfinity;
    if (!(room.value < wanted)) return -1;
    for (std::int64_t i = 0; i < n; ++i) {
      lam[i] = larger(lam[i] - room.value * (member[i] != 0.0 ? column[i] : 0.0), 0.0);
    }
    lam[add] = room.value;
    lam[room.index] = 0.0;
    return room.index;
  }

  Move choose() {
    Move move = {approach(), -1, false, false};
    if (move.drop < 0) {
      move.add = entering();
      if (move.add >= 0) move.drop = exchanged(move.add);
    }
    const bool settled = move.drop < 0 && move.add < 0;
    move.done = settled && fresh;
    move.refine = settled && !fresh;
    fresh = settled;
    return move;
  }

  // Brings a row into the support, or takes it out when it is in.
  void sweep(std::int64_t p) {
    const bool leaving = member[p] != 0.0;
    const double floor = kFloor * larger(square[p], kTiny);
    const double pivot = leaving ? smaller(distance[p], -1e-300) : larger(distance[p], floor);
    const double sign = leaving ? -1.0 : 1.0, edge = -border[p];
    tableau.column(p, column);
    for (std::int64_t i = 0; i < n; ++i) {
      scaled[i] = column[i] / pivot;
      column[i] = -column[i];
    }
    tableau.add_outer(column, scaled);
    for (std::int64_t i = 0; i < n; ++i) {
      distance[i] = multiply_add(column[i], scaled[i], distance[i]);
      border[i] = multiply_add(edge, scaled[i], border[i]);
      scaled[i] *= sign;
    }
    scaled[p] = distance[p] = -1.0 / pivot;
    border[p] = -edge / pivot * sign;
    tableau.set_column(p, scaled);
    member[p] = leaving ? 0.0 : 1.0;
  }

  // product = G y; the squared norm of the combination y, whose coefficients add up to total.
  double square_of_y(double& total) const {
    gram.multiply(y, product, sums);
    total = 0.0;
    for (std::int64_t i = 0; i < n; ++i) total += y[i];
    return dot(product, y, n) / total;
  }

  // Recomputes the border from the Gram matrix, by iterative refinement with the swept inverse.
  void refine() {
    double total;
    for (std::int64_t i = 0; i < n; ++i) y[i] = member[i] != 0.0 ? -border[i] : 0.0;
    for (int round = 0; round < kRefinements; ++round) {
      const double mu = square_of_y(total);
      for (std::int64_t i = 0; i < n; ++i) work[i] = member[i] != 0.0 ? mu - product[i] : 0.0;
      tableau.multiply(work, column, sums);
      for (std::int64_t i = 0; i < n; ++i) {
        y[i] = member[i] != 0.0 ? y[i] - column[i] - border[i] * (1.0 - total) : 0.0;
      }
    }
    const double mu = square_of_y(total);
    for (std::int64_t i = 0; i < k; ++i) border[i] = member[i] != 0.0 ? -y[i] : product[i] - mu;
  }

  // Leaves a point of the simplex in lam. The cap is for indefinite matrices, where the objective need not fall.
  void run() {
    start();
    for (std::int64_t count = 0; count < 5 * k + 50; ++count) {
      const Move move = choose();
      if (move.done) break;
      if (move.drop >= 0) sweep(move.drop);
      if (move.add >= 0) sweep(move.add);
      if (move.refine) refine();
    }
    double total = 0.0;
    for (std::int64_t i = 0; i < k; ++i) total += lam[i];
    const bool lost = !(total > 0.0 && total < kInfinity);
    const std::int64_t instead = lost ? shortest() : -1;
    for (std::int64_t i = 0; i < k; ++i) lam[i] = !lost ? lam[i] / total : i == instead ? 1.0 : 0.0;
  }

  // max_j (lam' G lam - (G lam)_j), at least 0.
  double excess() const {
    gram.multiply(lam, product, sums);
    const double value = dot(lam, product, n);
    for (std::int64_t i = k; i < n; ++i) product[i] = kInfinity;
    return larger(value - least(product, n).value, 0.0);
  }
};

}  // namespace fl_lightning::cpu::FL_ISA
