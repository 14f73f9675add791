# SPDX-License-Identifier: Apache-2.0
"""Several clients at a time, in processes of their own."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.core.lightning.names import Callback, lightning_module
from fl_lightning.executors.base import Executor, Runner
from fl_lightning.executors.parallel import messages as _wire
from fl_lightning.executors.parallel.runner import ParallelRunner

if TYPE_CHECKING:
    from fl_lightning.training.client_runner import ClientRunner

_STEP_HOOKS = ("on_after_backward", "on_before_backward", "on_before_optimizer_step", "on_before_zero_grad")


@dataclass(frozen=True)
class Parallel(Executor):
    """Trains several clients at a time in worker processes, on the CPU of a Linux machine.

    Weights, losses, logged values and states are those of :class:`Sequential` on one thread, bit for bit. Workers are
    copies of this process (fork) with one thread each. They stay from round to round, and are made anew when
    something has changed that they cannot see: attributes of the module, the data, the state of the method's client
    half. Only the update matrix and the global parameters lie in shared memory.

    Where training leaves traces in objects of this process (metric objects, lists in the module, loggers), the fit goes
    on with one client after the other, from the very client that would have left the first, and says why.

    Args:
        workers: processes; ``None``: one for every processor core that this process may use.

    Raises:
        ValueError: ``workers`` is not positive.
    """

    workers: int | None = None

    def __post_init__(self) -> None:
        """Checks the number."""
        number = self.workers
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"workers of Parallel must be a positive integer, found {number!r}")

    def obstacle(self, bench: ClientRunner) -> str | None:
        """Why nothing can be trained in other processes here."""
        trainer, rule = bench.trainer, bench.rule
        device = bench.binding.theta.device
        if device.type != "cpu":
            return f"worker processes train on the CPU, and this fit runs on {device}"
        if sys.platform != "linux":
            return f"worker processes are copies of a running process, which {sys.platform} does not support safely"
        if type(trainer.profiler) is not lightning_module("profilers").PassThroughProfiler:  # type: ignore[attr-defined]
            return "a profiler would not see what happens in worker processes"
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            for name in _STEP_HOOKS:
                if getattr(type(callback), name) is not getattr(Callback, name):
                    return f"{type(callback).__name__}.{name} would run in worker processes"
        if not knows_its_traces(rule):
            return f"{type(rule).__name__} has a commit but no take_aside that says what it needs from a client's visit"
        return None

    def crew(self, bench: ClientRunner) -> Runner:
        """Forks when the first client of the first round is asked for."""
        return ParallelRunner(bench, self.workers or len(os.sched_getaffinity(0)))

    def rows(self, number: int, like: Tensor) -> Tensor:
        """Memory that worker processes share."""
        if like.device.type != "cpu":
            return super().rows(number, like)
        return _wire.shared((number, like.numel()), like.dtype)


def knows_its_traces(rule: ClientRule) -> bool:
    """Whether a rule's ``take_aside`` is as new as its ``commit``."""
    owners = [name for kind in type(rule).__mro__ for name in ("take_aside", "commit") if name in vars(kind)]
    return type(rule).commit is ClientRule.commit or "take_aside" in owners[: owners.index("commit") + 1]
