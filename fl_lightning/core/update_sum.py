# SPDX-License-Identifier: Apache-2.0
"""The sum of a cohort's updates in the place of their matrix, where its weights are known before they arrive."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from fl_lightning import ops
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.updates import Columns, UpdateMatrix
from fl_lightning.ops.rows import accumulation_device, rounded

_CPU_COLUMNS, _DEVICE_COLUMNS = 1 << 16, 1 << 22
"""Columns at a time: so few that they stay in a processor's cache, or so many that a device does not wait for calls."""


class RunningSum:
    """Adds weighted rows up in float64, one after the other.

    The sum has the bits of :func:`fl_lightning.ops.layer_combine`, which adds them in the same order in every column.
    """

    def __init__(self, like: Tensor) -> None:
        device, n = accumulation_device(like), len(like)
        self._width = min(n, _CPU_COLUMNS if device.type == "cpu" else _DEVICE_COLUMNS)
        # The sum, and behind it what comes from a row: parts of both are the rows of a matrix.
        self._memory = torch.zeros(n + self._width, dtype=torch.float64, device=device)

    def clear(self) -> None:
        """Nothing was added."""
        self._memory.zero_()

    def add(self, row: Tensor, weight: float) -> None:
        """Adds a row ``[n]``, times a weight."""
        factors, n = torch.tensor([[1.0, weight]], dtype=torch.float64), len(row)
        for start in range(0, n, self._width):
            width = min(self._width, n - start)
            self._memory[n : n + width].copy_(row[start : start + width])
            both = self._memory.as_strided((2, width), (n - start, 1), start)
            both[0].copy_(ops.layer_combine(both, torch.tensor([0, width]), factors))

    def put(self, out: Tensor) -> None:
        """Writes the sum, rounded once, into a row ``[n]``."""
        for start in range(0, len(out), self._width):
            part = out[start : start + self._width]
            part.copy_(rounded(self._memory[start : start + len(part)], out.dtype))


class UpdateSum(UpdateMatrix):
    """What is left of updates that were added up as they arrived.

    Args:
        step: ``[n]`` their sum with the weights.
        weights: ``[m]`` float64 on the CPU.
        norms: ``[m]`` float64 norms of the updates.
        layout: how the columns divide into layers.
    """

    def __init__(self, step: Tensor, weights: Tensor, norms: Tensor, layout: ParamLayout) -> None:
        self._step, self._weights, self._norms, self._gram = step, weights, norms, None
        self.layout, self.columns = layout, Columns.whole(layout.numel)

    def __len__(self) -> int:
        return len(self._weights)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a method must read no more than the sum that its known_weights describes, found that it reads {name} of "
            "the updates: override known_weights, or give the strategy count_conflicts=True"
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the updates."""
        return self._step.dtype

    @property
    def device(self) -> torch.device:
        """Where the sum lies."""
        return self._step.device

    def combine(self, coeff: Tensor, out: Tensor | None = None) -> Tensor:
        """The sum, which is there with its own weights alone; see :meth:`UpdateMatrix.combine`."""
        if out is not None or not torch.equal(coeff.cpu().double(), self._weights):
            self.__getattr__("other sums")
        self.columns.note(coeff)
        return self._step
