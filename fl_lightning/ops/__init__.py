# SPDX-License-Identifier: Apache-2.0
"""Numerical kernels on the matrix of a cohort's updates.

Uses ``arguments``.

Each function checks its arguments and calls the op of the same name in ``torch.ops.fl_lightning``. The pure-torch
implementation defines the result; a compiled one may take its place. The ops are not differentiable: no result requires
gradients.

Common rules. ``rows`` is ``[m, n]`` in float64, float32, float16 or bfloat16, contiguous or not, on any device.
``offsets`` holds ``L + 1`` int64 numbers on the CPU that rise from 0 to ``n``; layer ``l`` is the columns
``offsets[l]`` up to ``offsets[l + 1]``, and a layer may be empty. Small tensors (coefficients, weights, orders) may
live beside the rows or on the CPU. Float64 results live beside the rows, or on the CPU where the device has no float64
(MPS). NaN and infinity are not looked for here: they propagate into the results that depend on them. On one machine
the results do not depend on the number of threads. Nor do they depend on how many processes hold the columns: sums over
columns have the order of :mod:`fl_lightning.ops.slices`.
"""

from __future__ import annotations

from fl_lightning.ops._coordinates import puc_combine, puc_track, trimmed_mean
from fl_lightning.ops._layers import (
    layer_combine,
    layer_cross_combine,
    layer_cross_gram,
    layer_dots,
    layer_gram,
    layer_squares,
)
from fl_lightning.ops._library import Backend, backend
from fl_lightning.ops._qp import common_descent, min_norm, project_conflicts

__all__ = [
    "Backend", "backend", "common_descent", "layer_combine", "layer_cross_combine", "layer_cross_gram", "layer_dots",
    "layer_gram", "layer_squares", "min_norm", "project_conflicts", "puc_combine", "puc_track",
    "trimmed_mean",
]  # fmt: skip
