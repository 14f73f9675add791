# SPDX-License-Identifier: Apache-2.0
"""Several clients at a time, in processes of their own."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.algorithms.base import obstacle
from fl_lightning.arguments import Bounds, checked
from fl_lightning.clients.base import CohortRunner, Executor
from fl_lightning.clients.client_runner import ClientRunner
from fl_lightning.clients.workers import messages
from fl_lightning.clients.workers.runner import ParallelRunner
from fl_lightning.core.aligned import padded
from fl_lightning.lightning.inspection import profiler_of, step_hook_of, users_callback


@checked(workers=Bounds(1), timeout=Bounds(above=0))
@dataclass(frozen=True)
class Parallel(Executor):
    """Trains several clients at a time in worker processes, on the CPU of a Linux machine.

    Weights, losses, logged values and states are those of :class:`Sequential` on one thread, bit for bit. The workers
    of a round are copies of this process as it is then (fork), with one thread each. Only the update matrix lies in
    shared memory. What clients leave behind is joined here, in cohort order.

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
        between = users_callback(trainer.callbacks, "on_train_batch_start", "on_train_batch_end")  # type: ignore[attr-defined]
        if between is not None:
            return f"worker processes would not see what {type(between).__name__} does between two clients"
        return obstacle(rule) or next(iter(clients.visits.in_turn()), None)

    def runner(self, clients: ClientRunner) -> CohortRunner:
        """Forks when the first client of a round is asked for."""
        return ParallelRunner(clients, self.workers or len(os.sched_getaffinity(0)), self.timeout)

    def rows(self, number: int, like: Tensor) -> Tensor:
        """Memory that worker processes share."""
        if like.device.type != "cpu":
            return super().rows(number, like)
        n = like.numel()
        return messages.shared((number, padded(n, like.dtype)), like.dtype)[:, :n]
