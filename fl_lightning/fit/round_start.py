# SPDX-License-Identifier: Apache-2.0
"""What a round has found: checkpoints hold it until the round is closed, and a broken fit goes back to it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.buffers import BufferBank
from fl_lightning.clients.client_optimizers import ClientOptimizers, scheduled_state
from fl_lightning.lightning.inspection import is_overridden, users_callback
from fl_lightning.lightning.names import Trainer

_HOOK = "on_train_epoch_start"


class RoundStart:
    """The state before a round's first hook, because the hooks run again when the round is trained again.

    Only hooks change parameters between clients, so without any they are not copied.
    """

    def __init__(
        self, trainer: Trainer, binding: BoundParameters, buffers: BufferBank, optimizers: ClientOptimizers
    ) -> None:
        self._trainer, self._binding, self._bank = trainer, binding, buffers
        callback = users_callback(trainer.callbacks, _HOOK)  # type: ignore[attr-defined]
        hooked = callback is not None or is_overridden(_HOOK, trainer.lightning_module)
        binding.sync()
        self.theta = binding.theta.clone() if hooked else binding.theta  # [n]
        self.unsaved = buffers.unsaved()  # non-persistent buffers
        buffers.remember()
        self._buffers = buffers.global_values()
        self._optimizers = optimizers.look()

    def with_buffers(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The module's state dictionary with the buffers as they were."""
        return {name: self._buffers.get(name, value) for name, value in state.items()}

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Writes down the optimizers' options and the states of schedulers."""
        with self._optimizers.shown():
            checkpoint["lr_schedulers"] = deepcopy(
                [c.scheduler.state_dict() for c in self._trainer.lr_scheduler_configs]
            )
            checkpoint["optimizer_states"] = [scheduled_state(optimizer) for optimizer in self._trainer.optimizers]

    def restore(self) -> None:
        """Brings parameters, buffers, optimizers and schedulers back."""
        if self.theta is not self._binding.theta:
            self._binding.theta.copy_(self.theta)
        self._bank.load(self._buffers)
        self._optimizers.restore()
