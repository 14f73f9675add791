# SPDX-License-Identifier: Apache-2.0
"""Where in a round a fit is, and how a fit resumes from there.

A round changes the global model once, in the server step. What is saved before it is what was there when the round
began, and the round is trained again: sampling, shuffling and every random number derive from (seed, round, client), so
it comes out the same. What is saved after it goes on with the validation, or with the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fl_lightning.lightning.names import Trainer


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
        """Brings counters and metrics to where the fit can go on; called when a fit has loaded what it loads.

        Goes on from a checkpoint, or from an earlier fit of the same trainer, however that ended.
        """
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
        _, current = self._epochs()
        return bool(current.started > current.processed)

    def _epochs(self) -> list[Any]:
        progress = self._trainer.fit_loop.epoch_progress
        return [progress.total, progress.current]


def _saved(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Copies that any ``torch.load`` reads: tensors on the CPU and Python's own numbers."""
    tensors = {name: value.detach().cpu().clone() for name, value in metrics.items() if isinstance(value, Tensor)}
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
    return tensors | numbers
