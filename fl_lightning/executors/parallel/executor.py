# SPDX-License-Identifier: Apache-2.0
"""Several clients at a time, in processes of their own."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.aligned import padded
from fl_lightning.core.lightning.inspection import profiler_of, step_hook_of
from fl_lightning.executors.base import CohortRunner, Executor
from fl_lightning.executors.parallel import messages
from fl_lightning.executors.parallel.runner import ParallelRunner
from fl_lightning.training.client_runner import ClientRunner


@checked(workers=Bounds(1), timeout=Bounds(above=0))
@dataclass(frozen=True)
class Parallel(Executor):
    """Trains several clients at a time in worker processes, on the CPU of a Linux machine.

    Weights, losses, logged values and states are those of :class:`Sequential` on one thread, bit for bit. Each worker
    is a copy of this process (fork) with one thread. Workers stay from round to round. New ones replace them if their
    copies are out of date: attributes of the module, the data, or the state of the method's client half have changed.
    Only the update matrix and the global parameters lie in shared memory.

    What clients add to metric objects and lists of the module is added here in cohort order. Some training changes
    other objects of this process: counters in the module, loggers. From the first client that does so, the fit trains
    sequentially and logs the reason. This client's result is discarded and recomputed.

    Args:
        workers: processes; ``None``: one for every processor core that this process may use.
        timeout: seconds that one client's training may take in a worker process. A worker that takes longer is killed,
            and its client has failed (``on_client_error``). ``None``: any time, since nobody but you can know how long
            a client takes.

    Raises:
        ValueError: ``workers`` or ``timeout`` is not positive.
    """

    workers: int | None = None
    timeout: float | None = None

    def obstacle(self, clients: ClientRunner) -> str | None:
        """Why nothing can be trained in other processes here."""
        trainer, rule, device = clients.trainer, clients.rule, clients.global_params.device
        if device.type != "cpu":
            return f"worker processes train on the CPU, and this fit runs on {device}"
        if sys.platform != "linux":
            return f"worker processes are copies of a running process, which {sys.platform} does not support safely"
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Adam, for one, asks CUDA for its stream wherever there is a GPU, also for parameters on the CPU.
            return "this process has used CUDA, which copies of it cannot use again"
        profiler = profiler_of(trainer)
        if profiler is not None:
            return f"Trainer(profiler={profiler}) would not see what happens in worker processes"
        hook = step_hook_of(trainer.callbacks)  # type: ignore[attr-defined]
        if hook is not None:
            return f"{hook} would run in worker processes"
        return rule.obstacle()

    def runner(self, clients: ClientRunner) -> CohortRunner:
        """Forks when the first client of the first round is asked for."""
        return ParallelRunner(clients, self.workers or len(os.sched_getaffinity(0)), self.timeout)

    def rows(self, number: int, like: Tensor) -> Tensor:
        """Memory that worker processes share."""
        if like.device.type != "cpu":
            return super().rows(number, like)
        n = like.numel()
        return messages.shared((number, padded(n, like.dtype)), like.dtype)[:, :n]
