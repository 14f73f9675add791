# SPDX-License-Identifier: Apache-2.0
"""Whether tensors hold NaN or infinity, in one pass and without a mask of their size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def all_finite(values: Tensor) -> Tensor:
    """A boolean scalar beside the values; true for none at all and for integers."""
    if values.numel() == 0 or not values.is_floating_point():
        return torch.ones((), dtype=torch.bool, device=values.device)
    return torch.stack(values.aminmax()).isfinite().all()  # NaN passes through both


def not_finite(named: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that hold NaN or infinity, in order; each device is asked once if there are none."""
    flags: dict[torch.device, list[Tensor]] = {}
    for value in named.values():
        flags.setdefault(value.device, []).append(all_finite(value))
    if all(bool(torch.stack(some).all()) for some in flags.values()):
        return []
    return [name for name, value in named.items() if not bool(all_finite(value))]
