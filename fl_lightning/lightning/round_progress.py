# SPDX-License-Identifier: Apache-2.0
"""Where in a round a fit is, and how a fit resumes from there.

A round changes the global model once, in the server step. A checkpoint taken before it belongs to the round's start:
the round is run again, and sampling, shuffling and every random number derive from (seed, round, client), so it comes
out the same. A checkpoint taken after it is continued: validation, or the end of the epoch, is what is left.

Lightning writes counters into its checkpoints. It does not write what they were when the epoch began, nor what was
logged: that is added here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from fl_lightning.lightning.names import Trainer


class RoundPhase(str, Enum):
    """The phases of a round that a checkpoint can meet."""

    BETWEEN = "between"  # no round is open
    TRAINING = "round"  # clients train; the server step is yet to come
    AGGREGATED = "aggregated"  # the server step is done; validation may run
    VALIDATED = "validated"  # validation is over
    EPOCH_END = "epoch_end"  # Lightning runs the hooks of the epoch's end


TRANSITIONS: dict[RoundPhase, frozenset[RoundPhase]] = {
    RoundPhase.BETWEEN: frozenset({RoundPhase.TRAINING, RoundPhase.BETWEEN}),
    RoundPhase.TRAINING: frozenset({RoundPhase.AGGREGATED}),
    RoundPhase.AGGREGATED: frozenset({RoundPhase.VALIDATED, RoundPhase.EPOCH_END}),
    RoundPhase.VALIDATED: frozenset({RoundPhase.EPOCH_END}),
    RoundPhase.EPOCH_END: frozenset({RoundPhase.TRAINING, RoundPhase.BETWEEN}),
}
"""Which phase may follow which.

A fit that is interrupted stays in its phase. :meth:`RoundProgress.resume` then decides what is left of the round.
"""

_OVER = (RoundPhase.AGGREGATED, RoundPhase.VALIDATED, RoundPhase.EPOCH_END)


class RoundProgress:
    """Where in a round the fit is; belongs to the epoch loop, which saves and loads it with its counters."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.phase = RoundPhase.BETWEEN
        self._round_start: dict[str, Any] = {}
        self._loaded: dict[str, Any] | None = None
        self._held_max_steps: int | None = None

    @property
    def _loop(self) -> Any:
        return self._trainer.fit_loop.epoch_loop

    def enter(self, phase: RoundPhase) -> None:
        """Goes on to the next phase; fails if it cannot follow the present one: Lightning left something out."""
        if phase not in TRANSITIONS[self.phase]:
            if self.phase is RoundPhase.TRAINING:
                raise RuntimeError(
                    f"round {self._trainer.current_epoch} must train its clients before it ends, and Lightning ended "
                    "the epoch without: go on from the last checkpoint with a new Trainer"
                )
            raise RuntimeError(f"a round's phase {phase.value!r} cannot follow {self.phase.value!r}")
        self.phase = phase

    def begin_at(self, index: int) -> None:
        """Lets a fit begin with a later round than the first."""
        for tracker in self._epochs():
            tracker.ready = tracker.started = tracker.processed = tracker.completed = index

    def open_round(self) -> None:
        """A round begins: remembers all counters."""
        self.enter(RoundPhase.TRAINING)
        state = self._trainer.fit_loop.state_dict()
        self._round_start = {
            "progress": {name: value for name, value in state.items() if not name.endswith("state_dict")},
            "batches_that_stepped": self._loop._batches_that_stepped,
            "steps": self._loop.global_step,
        }

    @property
    def steps_before(self) -> int:
        """``global_step`` before the present round."""
        return int(self._round_start.get("steps", 0))

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The phase, the counters of the round's start, and the metrics logged so far."""
        connector = self._trainer._logger_connector
        epoch: Mapping[str, Any] = {}
        if self.phase in _OVER:
            # Local training is over, so these are what Lightning is going to log at the end of the epoch.
            epoch = self._loop._results.metrics(on_step=False)
        return {
            "place": self.phase.value,
            "round_start": self._round_start,
            "metrics": {
                "callback": _saved(connector._callback_metrics),
                "log": _saved(connector._logged_metrics),
                "pbar": _saved(connector._progress_bar_metrics),
            },
            "epoch": {name: _saved(values) for name, values in epoch.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the phase from a checkpoint; :meth:`resume` does the rest once the trainer is ready."""
        self._loaded = state
        self.phase, self._round_start = RoundPhase(state["place"]), state["round_start"]

    # ---- resuming

    def resume(self) -> None:
        """Brings counters and metrics to where the fit can go on; called when a fit has loaded what it loads.

        Goes on from a checkpoint, or from an earlier fit of the same trainer, however that ended.
        """
        self.restore_max_steps()
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._restore_metrics(loaded["metrics"])
            if self.phase in (RoundPhase.AGGREGATED, RoundPhase.VALIDATED):
                self._finish_later(loaded["epoch"])
                return
            if self.phase is RoundPhase.EPOCH_END:
                self._finish_epoch(loaded["epoch"])
        if self.phase is RoundPhase.TRAINING:
            self._rewind()
        elif self.phase in (RoundPhase.AGGREGATED, RoundPhase.VALIDATED):
            # An earlier fit was interrupted in validation. The server step counts, the rest of the epoch is given up.
            for tracker in self._epochs():
                tracker.processed += 1
            self._loop._batches_that_stepped += 1
        self._finish_counters()
        self.phase = RoundPhase.BETWEEN

    def restore_max_steps(self) -> None:
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

    def _finish_counters(self) -> None:
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
