# SPDX-License-Identifier: Apache-2.0
"""Projection onto the unit simplex."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.arguments import checked


@checked()
def project_simplex(v: Tensor) -> Tensor:
    """The nearest point of the unit simplex, along the last dimension.

    With the entries sorted in decreasing order the result is ``max(v - shift, 0)``, where ``shift`` makes the largest
    possible leading part sum to one (Held, Wolfe and Crowder, Mathematical Programming 6, 1974).

    Args:
        v: ``[..., k]`` floating point, ``k >= 1``.

    Returns:
        ``[..., k]`` in the dtype of ``v``: nonnegative, sums to one up to rounding.

    Raises:
        TypeError: ``v`` is not floating point.
        ValueError: ``v`` has no entries along its last dimension, or contains NaN or infinity.
    """
    if v.dim() == 0 or v.shape[-1] == 0:
        raise ValueError(f"v must have shape [..., k] with k >= 1, found {list(v.shape)}")
    if not v.is_floating_point():
        raise TypeError(f"v must be floating point, found {v.dtype}")
    if not bool(v.isfinite().all()):
        raise ValueError("v must be finite, found NaN or infinity")
    # Only differences matter; taken from the largest entry they cannot overflow, and large offsets cost no accuracy.
    centred = v.to(torch.float64) - v.amax(-1, keepdim=True).to(torch.float64)
    sorted_values = centred.sort(-1, descending=True).values
    counts = torch.arange(1, v.shape[-1] + 1, dtype=torch.float64, device=v.device)
    shifts = (sorted_values.cumsum(-1) - 1.0) / counts
    last = (sorted_values > shifts).sum(-1, keepdim=True) - 1
    return (centred - shifts.gather(-1, last)).clamp_min(0.0).to(v.dtype)
