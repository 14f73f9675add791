# SPDX-License-Identifier: Apache-2.0
"""What Lightning counts in a federated fit: where in a round it is, and what the clock says while clients train.

Clients of one round train at the same time, so their steps cannot be added up to a time. A round lasts ``K`` ticks, the
mean number of optimizer steps of a client's visit, rounded up. Step ``s`` of a visit in round ``r`` runs at tick
``r K + min(s, K - 1)``, whoever the client is.

A round changes the global model once, in the server step. What is saved before it is what was there when the round
began, and the round is trained again: sampling, shuffling and every random number derive from (seed, round, client), so
it comes out the same. What is saved after it goes on with the validation, or with the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fl_lightning.lightning.names import Trainer

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
            self.step_schedulers("step")

    def end_batch(self) -> None:
        """A batch is about to have its last hook, before which Lightning ends an epoch for schedulers."""
        if self.is_last_batch and self.ends_epochs:
            self.step_schedulers("epoch")

    def counted(self) -> tuple[int, int]:
        """Optimizer steps and batches of the visit so far."""
        return self.steps_taken, int(self._loop.batch_progress.current.ready)

    def end_visit(self) -> None:
        """Puts everything back to where it was before the visit."""
        if self._outside is None:
            return
        self.opens_group = self.ends_group = True
        (self._loop.batch_progress, counts), self._outside = self._outside, None
        for tracker, before in zip(self._trackers(), counts, strict=True):
            vars(tracker).update(before)

    def close_round(self, steps: int) -> None:
        """Moves the clock, and schedulers with it, from the beginning of the round to its end."""
        self._excuse_optimizers()
        start = self.tick
        if self.scheduled and self.mean_visit is not None:
            clients = self._loop.batch_progress
            progress = self._loop.batch_progress = type(clients)()
            try:
                for step in range(1, steps + 1):
                    self._move_to(start + step)
                    progress.current.ready, progress.is_last_batch = self.mean_visit.batches_after(step), step == steps
                    self.step_schedulers("step")
            finally:
                self._loop.batch_progress = clients
        self._move_to(start + steps)

    def step_schedulers(self, interval: str) -> None:
        """Schedulers that count these intervals step: ``"step"`` or ``"epoch"``."""
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
        for tracker in self._trackers()[4:6] if self._by_hand else self._trackers()[:4]:
            for name in vars(tracker):
                setattr(tracker, name, max(getattr(tracker, name) + by, 0))

    @property
    def _by_hand(self) -> bool:
        return not self._loop.trainer.lightning_module.automatic_optimization

    def _trackers(self) -> list[Any]:
        loop, automatic = self._loop, self._loop.automatic_optimization.optim_progress.optimizer
        by_hand = loop.manual_optimization.optim_step_progress
        progresses = (automatic.step, automatic.zero_grad, by_hand, loop.scheduler_progress)
        return [tracker for progress in progresses for tracker in (progress.total, progress.current)]


class RoundProgress:
    """Where in a round the fit is; belongs to the epoch loop, which saves and loads it with its counters."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.start: dict[str, Any] | None = None  # what a checkpoint held of the loops when the open round began
        self.steps_before = 0  # ``global_step`` before the present round
        self.closed = False  # the server step is done, and the epoch is not over
        self.validated = False  # so is the validation after it
        self._loaded: dict[str, Any] | None = None

    @property
    def _loop(self) -> Any:
        return self._trainer.fit_loop.epoch_loop

    def begin_at(self, index: int) -> None:
        """Lets a fit begin with a later round than the first."""
        for tracker in self._epochs():
            tracker.ready = tracker.started = tracker.processed = tracker.completed = index

    def open_round(self) -> None:
        """A round begins."""
        self.closed = False
        self.start, self.steps_before = self._trainer.fit_loop.state_dict(), self._loop.global_step

    def close_round(self) -> None:
        """The server step is done."""
        self.start, self.closed, self.validated = None, True, False

    def end_epoch(self) -> None:
        """The hooks of the epoch's end begin; raises RuntimeError if Lightning has left the round out."""
        if self.start is not None:
            raise RuntimeError(
                f"round {self._trainer.current_epoch} must train its clients before it ends, and Lightning ended "
                "the epoch without: go on from the last checkpoint with a new Trainer"
            )

    def end_fit(self) -> None:
        """The fit is over, or was broken off: an open round is undone, the rest of an epoch after it given up."""
        if self.start is not None:
            self._trainer.fit_loop.load_state_dict(self.start)
        elif self.closed and self._within_epoch:
            self._loop._batches_that_stepped += 1
            for tracker in self._epochs():
                tracker.processed += 1
        self.start, self.closed = None, False

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What Lightning does not save: whether the round is closed, and what was logged."""
        metrics = dict(self._trainer._logger_connector._callback_metrics)
        epoch: Mapping[str, Any] = {}
        if self.closed:
            # Local training is over, so these are what Lightning is going to log at the end of the epoch.
            results = self._loop._results.metrics(on_step=False)
            metrics, epoch = {**metrics, **results["callback"]}, results["log"]
        flags = {"closed": self.closed, "validated": self.validated, "steps_before": self.steps_before}
        return {**flags, "metrics": _saved(metrics), "epoch": _saved(epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state_dict` returned; :meth:`resume` does the rest once the trainer is ready."""
        self._loaded = state
        self.closed, self.validated, self.steps_before = (state[n] for n in ("closed", "validated", "steps_before"))

    def resume(self) -> None:
        """Brings counters and metrics to where a fit can go on from what it has loaded, or from the fit before it."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            connector, step = self._trainer._logger_connector, self._loop._batches_that_stepped
            connector._callback_metrics.update(loaded["metrics"])
            connector.log_metrics(dict(loaded["epoch"]), step=step if self._within_epoch else step - 1)
            if self.closed and self._within_epoch:
                return  # Lightning goes on with the validation
            if self.closed:
                self._loop._update_learning_rates("epoch", update_plateau_schedulers=True)
        self.closed = False
        for tracker in self._epochs():
            tracker.ready = tracker.started = tracker.completed = tracker.processed
        # Not through fit_loop.restarting: with max_steps its setter ignores what it is given.
        self._trainer.fit_loop._restarting = False
        self._loop.restarting = False

    @property
    def _within_epoch(self) -> bool:
        """Whether an epoch has begun, and the hooks of its end have not."""
        current = self._epochs()[1]
        return bool(current.started > current.processed)

    def _epochs(self) -> list[Any]:
        progress = self._trainer.fit_loop.epoch_progress
        return [progress.total, progress.current]


def _saved(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Copies that any ``torch.load`` reads: tensors on the CPU and Python's own numbers."""
    tensors = {name: value.detach().cpu().clone() for name, value in metrics.items() if isinstance(value, Tensor)}
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
    return tensors | numbers
