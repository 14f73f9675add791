// SPDX-License-Identifier: Apache-2.0
// The numbers of min_norm's search, the same on every device. fl_lightning/ops/_active_set.py and _gram_problems.py,
// which define them, say what they are for; all are relative to squared norms of rows.
#pragma once

namespace fl_lightning {

inline constexpr double kSlack = 2e-15;      // a slack above minus this is rounding
inline constexpr double kDependent = 1e-13;  // a row so near the hull of the support is exchanged, never added
inline constexpr double kFloor = 1e-15;      // smallest pivot
inline constexpr double kShare = 1e-12;      // of a row in a member: smaller ones are rounding
inline constexpr double kTiny = 2.2250738585072014e-308;
inline constexpr int kRefinements = 2;

// Where this excess is left, the matrix has a negative eigenvalue: it is solved again with a ridge, and a larger one.
inline constexpr double kEnough = 1e-11;
inline constexpr double kFirstRidge = 1e-12, kNextRidge = 100.0;
inline constexpr int kRidges = 8;

}  // namespace fl_lightning
