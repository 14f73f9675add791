# SPDX-License-Identifier: Apache-2.0
"""The clock of a federated fit: what Lightning counts while clients train, and when schedulers step.

Clients of one round train at the same time, so their steps cannot be added up to a time. A round lasts ``K`` ticks, the
mean number of optimizer steps of a client's visit, rounded up. Step ``s`` of a visit in round ``r`` runs at tick
``r K + min(s, K - 1)``, whoever the client is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop


@dataclass(frozen=True)
class MeanVisit:
    """The visit that the clock counts by: means over the clients that train, rounded up."""

    steps: int  # K, of the optimizer; with manual optimization one per batch is assumed
    batches: int  # of all local epochs
    pass_batches: int  # of one local epoch
    window: int = 1  # batches per optimizer step

    def batches_after(self, steps: int) -> int:
        """How many batches this many steps take; the last step of a local epoch may take fewer than a window."""
        passes, rest = divmod(steps, -(-self.pass_batches // self.window))
        return passes * self.pass_batches + min(rest * self.window, self.pass_batches)


class RoundClock:
    """Moves the counters of an epoch loop so that the module and its schedulers see the clock."""

    def __init__(self, loop: _TrainingEpochLoop) -> None:
        self._loop = loop
        self.mean_visit: MeanVisit | None = None  # before a fit has data
        self.endless = ""  # why nobody can say how many rounds the fit has
        self.shown_loader: Any = None  # ``trainer.train_dataloader`` until data that was read before is read again
        self.places: int | float = inf  # clients of a round, which Lightning takes for batches
        self.counts_clients = False  # batches are clients at the moment, because callbacks are told of one
        self.ends_epochs = False  # schedulers of epochs step in visits, too: the module has a hook after that
        self.scheduled = self.stepping = False  # the loop steps schedulers within visits, and does so at the moment
        # The batch is the first or last of an optimizer step's, as every one outside visits: the optimizer forgets
        # gradients before it, or steps after it.
        self.opens_group = self.ends_group = True
        self._limit: int | None = None
        self._start = self._held = 0
        self._counts_by_hand = False
        self._outside: tuple[Any, list[dict[str, int]]] | None = None

    # ---- what the trainer shows

    @property
    def shown_batches(self) -> int | float:
        """``trainer.num_training_batches``: of a visit, or clients where callbacks are told of one."""
        return self.places if self.mean_visit is None or self.counts_clients else self.mean_visit.batches

    @contextmanager
    def counting_clients(self) -> Iterator[None]:
        """Shows clients as batches."""
        before, self.counts_clients = self.counts_clients, True
        try:
            yield
        finally:
            self.counts_clients = before

    @property
    def tick(self) -> int:
        """``trainer.global_step``."""
        return self._loop.global_step

    # ---- a visit

    def begin_round(self, steps: int, limit: int | None) -> None:
        """Moves the clock to the current epoch's first tick, of ``steps``; visits end with tick ``limit``, if known."""
        self._excuse_optimizers()
        self._limit = limit
        self._move_to(self._loop.trainer.current_epoch * steps)
        self._start = self.tick

    def begin_visit(self) -> None:
        """A client is about to train: batches are its own from now on."""
        loop = self._loop
        self._outside = loop.batch_progress, [dict(vars(tracker)) for tracker in self._trackers()]
        loop.batch_progress = type(loop.batch_progress)()
        if self.mean_visit is not None:
            loop.batch_progress.total.ready = loop.trainer.current_epoch * self.mean_visit.batches
        self._held, self._counts_by_hand = 0, self._by_hand

    def begin_batch(self, is_last: bool, opens_group: bool = True, ends_group: bool = True) -> None:
        """The client's next batch."""
        self.opens_group, self.ends_group = opens_group, ends_group
        progress = self._loop.batch_progress
        progress.total.ready += 1
        progress.current.ready += 1
        progress.is_last_batch = is_last
        # A batch has one step at most, unless the module optimizes by hand.
        if self._limit is not None and (self._counts_by_hand or progress.current.ready > self._limit):
            over = max(self.tick - self._start - self._limit + 1, 0)
            self._move_to(self.tick - over)
            self._held += over

    @property
    def steps_taken(self) -> int:
        """Optimizer steps of the visit so far."""
        return self.tick - self._start + self._held

    @property
    def is_last_batch(self) -> bool:
        """Whether the visit ends with the present batch."""
        return bool(self._loop.batch_progress.is_last_batch)

    @property
    def is_in_mean_visit(self) -> bool:
        """Whether a mean visit would have a batch after the present one, or this one ends the visit."""
        mean = self.mean_visit
        return mean is None or self.is_last_batch or self._loop.batch_progress.current.ready < mean.batches

    def end_step(self) -> None:
        """The visit has taken an optimizer step: schedulers move on, unless the round has no further tick."""
        steps, limit = self.steps_taken, self._limit
        if limit is None or steps < limit or (steps == limit and self.is_last_batch):
            self._step_schedulers("step")

    def end_batch(self) -> None:
        """A batch is about to have its last hook, before which Lightning ends an epoch for schedulers."""
        if self.is_last_batch and self.ends_epochs:
            self.end_epoch()

    def end_epoch(self) -> None:
        """Schedulers that count epochs step."""
        self._step_schedulers("epoch")

    def counted(self) -> tuple[int, int]:
        """Optimizer steps and batches of the visit so far."""
        return self.steps_taken, int(self._loop.batch_progress.current.ready)

    def end_visit(self) -> None:
        """Puts everything back to where it was before the visit."""
        if self._outside is None:
            return
        loop = self._loop
        self.opens_group = self.ends_group = True
        (loop.batch_progress, counts), self._outside = self._outside, None
        for tracker, before in zip(self._trackers(), counts, strict=True):
            vars(tracker).update(before)

    def close_round(self, steps: int) -> None:
        """Moves the clock, and schedulers with it, from the beginning of the round to its end."""
        start = self.tick
        self._excuse_optimizers()
        if self.scheduled and self.mean_visit is not None:
            clients = self._loop.batch_progress
            progress = self._loop.batch_progress = type(clients)()
            try:
                for step in range(1, steps + 1):
                    self._move_to(start + step)
                    progress.current.ready, progress.is_last_batch = self.mean_visit.batches_after(step), step == steps
                    self._step_schedulers("step")
            finally:
                self._loop.batch_progress = clients
        self._move_to(start + steps)

    def _step_schedulers(self, interval: str) -> None:
        self._excuse_optimizers()
        self.stepping = True
        try:
            self._loop._update_learning_rates(interval, update_plateau_schedulers=False)
        finally:
            self.stepping = False

    def _excuse_optimizers(self) -> None:
        for optimizer in self._loop.trainer.optimizers:
            optimizer._opt_called = True  # or schedulers warn where it has taken no step

    def _move_to(self, tick: int) -> None:
        by = tick - self.tick
        if by == 0:
            return
        for tracker in self._trackers()[4:6] if self._by_hand else self._trackers()[:4]:
            for name in vars(tracker):
                setattr(tracker, name, max(getattr(tracker, name) + by, 0))

    @property
    def _by_hand(self) -> bool:
        return not self._loop.trainer.lightning_module.automatic_optimization

    def _trackers(self) -> list[Any]:
        automatic = self._loop.automatic_optimization.optim_progress.optimizer
        by_hand = self._loop.manual_optimization.optim_step_progress
        progresses = (automatic.step, automatic.zero_grad, by_hand, self._loop.scheduler_progress)
        return [tracker for progress in progresses for tracker in (progress.total, progress.current)]
