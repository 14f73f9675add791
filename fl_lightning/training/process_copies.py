# SPDX-License-Identifier: Apache-2.0
"""What crosses between a fit and its copies in other processes: a round's state, and what a client leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.core.lightning.epoch_loop import FederatedEpochLoop
from fl_lightning.core.lightning.fast_log import LogCall, TrainingLog, replay
from fl_lightning.core.lightning.process_copy import load_progress, progress_of
from fl_lightning.training.bound_parameters import BoundParameters
from fl_lightning.training.buffers import BufferBank
from fl_lightning.training.client_optimizers import ClientOptimizers
from fl_lightning.training.gathering import Gathered
from fl_lightning.training.local_trainer import LocalTrainer
from fl_lightning.training.schedules import Schedules


@dataclass(frozen=True)
class RoundState:
    """Where a fit is when a client of a round is about to train; the global parameters travel apart.

    Attributes:
        progress: of the epoch loop.
        buffers: the module's global buffers.
        optimizer_options: of the client optimizers, per optimizer and parameter group.
        schedulers: what the learning-rate schedulers know in numbers.
        schedules: what the fit knows of them beside that.
    """

    progress: dict[str, Any]
    buffers: tuple[dict[tuple[torch.dtype, torch.device], Tensor], dict[str, Tensor]]
    optimizer_options: list[list[dict[str, Any]]]
    schedulers: list[dict[str, Any]]
    schedules: dict[str, Any]


@dataclass(frozen=True)
class ClientTraces:
    """What a client's training leaves behind beside its upload.

    Attributes:
        logged: its calls of ``self.log``.
        gathered: what it added to metrics and lists of the module.
        optimizers: optimizer states to keep.
    """

    logged: list[LogCall] = field(default_factory=list)
    gathered: Gathered = field(default_factory=Gathered)
    optimizers: list[dict[str, Any]] | None = None


class ProcessCopies:
    """Sends a round's state to copies of the fit, and takes over what clients left behind there.

    Args:
        loop: the epoch loop.
        rule: the client rule.
        binding: the bound module.
        buffers: its buffers.
        optimizers: the clients' optimizers.
        schedules: their learning-rate schedulers.
        local: local training.
        objects: gives what copies have besides the module, by name.
        keep_optimizer: clients get their optimizer's state of the last round back.

    Attributes:
        objects: gives what copies have besides the module, by name.
    """

    def __init__(
        self,
        loop: FederatedEpochLoop,
        rule: ClientRule,
        binding: BoundParameters,
        buffers: BufferBank,
        optimizers: ClientOptimizers,
        schedules: Schedules,
        local: LocalTrainer,
        objects: Callable[[], dict[str, object]],
        keep_optimizer: bool,
    ) -> None:
        self._loop, self._rule, self._binding, self._buffers = loop, rule, binding, buffers
        self._optimizers, self._local, self._keep = optimizers, local, keep_optimizer
        self.objects, self._schedules = objects, schedules

    @property
    def go_stale(self) -> bool:
        """Whether every round changes state that a copy made before it does not have."""
        return self._rule.overrides("commit", "keep") or self._keep

    @contextmanager
    def recording_log(self, log: TrainingLog) -> Iterator[None]:
        """Lets ``self.log`` in local training go elsewhere."""
        own, self._local.log = self._local.log, log
        try:
            yield
        finally:
            self._local.log = own

    def round_state(self) -> RoundState:
        """What another copy needs to know of the round before its first client."""
        return RoundState(
            progress_of(self._loop), self._buffers.state(), self._optimizers.options(),
            self._schedules.numbers(), self._schedules.state_dict(),
        )  # fmt: skip

    def load_round_state(self, state: RoundState, params: Tensor) -> None:
        """Takes what :meth:`round_state` gave elsewhere, and global parameters ``[n]``."""
        load_progress(self._loop, state.progress)
        self._binding.theta.copy_(params)
        self._buffers.load_state(state.buffers)
        self._optimizers.load_options(state.optimizer_options)
        self._schedules.put_numbers(state.schedulers)
        self._schedules.load_state_dict(state.schedules)
        self._schedules.begin_round()

    def traces_of(self, client: int, logged: list[LogCall], gathered: Gathered, failed: bool) -> ClientTraces:
        """What a client's training has left behind in this copy, which forgets it.

        Args:
            client: the client.
            logged: its calls of ``self.log``.
            gathered: what it added to metrics and lists of the module.
            failed: its training raised: its optimizer's state is not kept.
        """
        optimizers = None if failed else self._optimizers.take_aside(client)
        self._optimizers.forget_aside()
        return ClientTraces(logged, gathered, optimizers)

    def replay(self, client: int, traces: ClientTraces) -> None:
        """Lets everything happen here that happened in another copy."""
        module = self._loop.trainer.lightning_module
        replay(module, self._local.log, traces.logged, self._loop.expect)
        traces.gathered.add_to(module)
        self._optimizers.put_aside(client, traces.optimizers)
