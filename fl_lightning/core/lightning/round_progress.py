# SPDX-License-Identifier: Apache-2.0
"""Where in a round a fit is, and how a fit goes on from there.

A round changes the global model once, in the server step. A checkpoint taken before it belongs to the round's start:
the round is run again, and sampling, shuffling and every random number derive from (seed, round, client), so it comes
out the same. A checkpoint taken after it is continued: validation, or the end of the epoch, is what is left.

Lightning writes counters into its checkpoints. It does not write what they were when the epoch began, nor what was
logged: that is added here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fl_lightning.core.lightning.names import Trainer

if TYPE_CHECKING:
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

Place = Literal["between", "round", "aggregated", "validated", "epoch_end"]


class RoundProgress:
    """Belongs to the epoch loop, which saves and loads it with its counters.

    Attributes:
        place: ``"between"`` rounds; in a ``"round"`` before its server step; ``"aggregated"`` after it, validation
            included; ``"validated"``; in the hooks of ``"epoch_end"``.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.place: Place = "between"
        self._round_start: dict[str, Any] = {}
        self._loaded: dict[str, Any] | None = None
        self._held_max_steps: int | None = None

    @property
    def _loop(self) -> _TrainingEpochLoop:
        return self._trainer.fit_loop.epoch_loop

    def open_round(self) -> None:
        """A round begins: remembers all counters."""
        self.place = "round"
        state = self._trainer.fit_loop.state_dict()
        self._round_start = {
            "progress": {name: value for name, value in state.items() if not name.endswith("state_dict")},
            "batches_that_stepped": self._loop._batches_that_stepped,
        }

    def close_round(self) -> None:
        """A round ends: makes sure that there was one.

        Raises:
            RuntimeError: Lightning ended the epoch before the server step.
        """
        if self.place == "round":
            raise RuntimeError(
                f"round {self._trainer.current_epoch} must train its clients before it ends, and Lightning ended the "
                "epoch without: go on from the last checkpoint with a new Trainer"
            )
        self.place = "epoch_end"

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The place, the counters of the round's start, and the metrics logged so far."""
        connector = self._trainer._logger_connector
        epoch: Mapping[str, Any] = {}
        if self.place in ("aggregated", "validated", "epoch_end"):
            # Local training is over, so these are what Lightning is going to log at the end of the epoch.
            epoch = self._loop._results.metrics(on_step=False)
        return {
            "place": self.place,
            "round_start": self._round_start,
            "metrics": {
                "callback": _saved(connector._callback_metrics),
                "log": _saved(connector._logged_metrics),
                "pbar": _saved(connector._progress_bar_metrics),
            },
            "epoch": {name: _saved(values) for name, values in epoch.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the place from a checkpoint; :meth:`go_on` does the rest once the trainer is ready."""
        self._loaded = state
        self.place, self._round_start = state["place"], state["round_start"]

    # ---- going on

    def go_on(self) -> None:
        """Brings counters and metrics to where the fit can go on; called when a fit has loaded what it loads.

        Goes on from a checkpoint, or from an earlier fit of the same trainer, however that ended.
        """
        self.release()
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._restore_metrics(loaded["metrics"])
            if self.place in ("aggregated", "validated"):
                self._finish_later(loaded["epoch"])
                return
            if self.place == "epoch_end":
                self._finish_epoch(loaded["epoch"])
        if self.place == "round":
            self._rewind()
        elif self.place in ("aggregated", "validated"):
            # An earlier fit was interrupted in validation. The server step counts, the rest of the epoch is given up.
            for tracker in self._epochs():
                tracker.processed += 1
            self._loop._batches_that_stepped += 1
        self._settle()
        self.place = "between"

    def release(self) -> None:
        """Puts ``max_steps`` back; called when the epoch loop starts."""
        if self._held_max_steps is not None:
            self._loop.max_steps, self._held_max_steps = self._held_max_steps, None

    def _restore_metrics(self, metrics: Mapping[str, dict[str, Any]]) -> None:
        connector = self._trainer._logger_connector
        connector._callback_metrics.update(metrics["callback"])
        connector._logged_metrics.update(metrics["log"])
        connector._progress_bar_metrics.update(metrics["pbar"])

    def _finish_later(self, epoch: Mapping[str, dict[str, Any]]) -> None:
        """Leaves the epoch open, with what local training has logged in it."""
        for name, value in epoch["callback"].items():
            # A name of its own, so that it cannot clash with what training_step logs in the next round.
            self._loop._results.log(
                "resumed", name, torch.as_tensor(value), name in epoch["pbar"], name in epoch["log"], batch_size=1
            )
        # Lightning would stop at once if the round reached max_steps; it has yet to end.
        self._held_max_steps, self._loop.max_steps = self._loop.max_steps, -1

    def _finish_epoch(self, epoch: Mapping[str, dict[str, Any]]) -> None:
        """What Lightning does after the hooks of an epoch's end, and forgets when it resumes from there."""
        loop, connector = self._loop, self._trainer._logger_connector
        self._restore_metrics(epoch)
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        loop._batches_that_stepped -= 1
        connector.log_metrics(epoch["log"])
        loop._batches_that_stepped += 1

    def _rewind(self) -> None:
        start = self._round_start
        self._trainer.fit_loop.load_state_dict(dict(start["progress"]))
        self._loop._batches_that_stepped = start["batches_that_stepped"]

    def _settle(self) -> None:
        for tracker in self._epochs():
            tracker.ready = tracker.started = tracker.completed = tracker.processed
        # Not through fit_loop.restarting: with max_steps its setter ignores what it is given.
        fit_loop = self._trainer.fit_loop
        fit_loop._restarting = False
        self._loop.restarting = False

    def _epochs(self) -> list[Any]:
        progress = self._trainer.fit_loop.epoch_progress
        return [progress.total, progress.current]


def _saved(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Copies that any ``torch.load`` reads: tensors on the CPU and Python's own numbers."""
    saved: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Tensor):
            saved[name] = value.detach().cpu().clone()
        elif isinstance(value, (int, float)):
            saved[name] = int(value) if isinstance(value, int) else float(value)
    return saved
