// SPDX-License-Identifier: Apache-2.0
// The projections of one update. Included once per instruction set by every_isa.h.
namespace fl_lightning::cpu::FL_ISA {

// products: m numbers of scratch, the inner products of the projected update with all originals.
inline void project(const double* gram, std::int64_t m, const std::int64_t* order, bool keep, std::int64_t i,
                    double* products, double* coeff) {
  for (std::int64_t k = 0; k < m; ++k) {
    products[k] = gram[i * m + k];
    coeff[k] = k == i ? 1.0 : 0.0;
  }
  for (std::int64_t position = 0; position < m && !keep; ++position) {
    const std::int64_t j = order[position];
    const double *other = gram + j * m, square = other[j];
    // Not (dot >= 0) instead of dot < 0: a NaN product must show in the result, not count as "no conflict".
    if (j == i || products[j] >= 0.0 || square <= 0.0) continue;
    const double share = products[j] / square;
    coeff[j] -= share;
    // No fused multiply-add: the sign of what is left decides, and must be the same with all instruction sets.
    for (std::int64_t k = 0; k < m; ++k) products[k] -= share * other[k];
  }
}

}  // namespace fl_lightning::cpu::FL_ISA
