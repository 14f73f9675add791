# SPDX-License-Identifier: Apache-2.0
"""Where float64 results live on devices that have no float64."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_device(rows: Tensor) -> torch.device:
    """Where float64 results about ``rows`` live: beside them, or on the CPU where the device has no float64."""
    return torch.device("cpu") if rows.device.type == "mps" else rows.device
