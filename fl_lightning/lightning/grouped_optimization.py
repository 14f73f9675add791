# SPDX-License-Identifier: Apache-2.0
"""Lightning's automatic optimization, with the visit's clock in place of ``batch_idx % accumulate_grad_batches``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from fl_lightning.lightning.names import Trainer, lightning_module
from fl_lightning.lightning.round_clock import VisitClock

if TYPE_CHECKING:
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
else:
    _AutomaticOptimization = lightning_module("loops.optimization.automatic")._AutomaticOptimization


class GroupedOptimization(_AutomaticOptimization):
    """Forgets gradients where a group of batches begins.

    Hooks get a batch's place in the visit, and groups begin anew in each pass, so the place does not tell.
    """

    def __init__(self, trainer: Trainer, clock: VisitClock) -> None:
        super().__init__(trainer)
        self._clock = clock

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        if self._skip_backward or not self._clock.opens_group:
            return None

        def zero_grad() -> None:
            self._on_before_zero_grad(optimizer)
            self._optimizer_zero_grad(batch_idx, optimizer)

        return zero_grad
