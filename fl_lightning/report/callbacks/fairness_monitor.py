# SPDX-License-Identifier: Apache-2.0
"""How evenly the clients are served, over the rounds of a fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fl_lightning.arguments import Bounds, checked
from fl_lightning.lightning.names import Callback, LightningModule, Trainer
from fl_lightning.metrics.functional import Mode, guessed_mode
from fl_lightning.report.callbacks._federated import evaluation, is_fitting, is_fresh_fit, records
from fl_lightning.report.figures import new_figure


@checked(mean=Bounds(finite=False), angle=Bounds(finite=False), worst_10=Bounds(finite=False))
@dataclass(frozen=True)
class FairnessCurve:
    """One metric over the rounds; the lists have equal lengths.

    Attributes:
        rounds: rounds finished at each validation.
        mean: mean over the clients.
        angle: fairness angle in radians; NaN for metrics where smaller is better.
        worst_10: mean of the worst tenth of the clients.
    """

    rounds: list[int] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    angle: list[float] = field(default_factory=list)
    worst_10: list[float] = field(default_factory=list)


class FairnessMonitor(Callback):
    """Keeps mean, fairness angle and worst 10 % of every validation metric in memory, and draws them.

    The curves travel with the checkpoint. A resumed fit continues them: points of the round in hand and of later ones,
    left by an interrupted run, are replaced. ``trainer.validate`` adds nothing.

    Args:
        larger_is_better: orientation of metrics where ``fairness_mode`` of the strategy does not say it.
    """

    @checked()
    def __init__(self, larger_is_better: Mapping[str, bool] | None = None) -> None:
        self.larger_is_better = dict(larger_is_better or {})
        self._curves: dict[str, FairnessCurve] = {}
        self._modes: dict[str, Mode] = {}

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics seen so far."""
        return tuple(self._curves)

    def curves(self, metric: str) -> FairnessCurve:
        """The curves of one metric.

        Raises:
            ValueError: no validation has reported this metric.
        """
        if metric not in self._curves:
            raise ValueError(f"metric must be one of {list(self._curves)}, found {metric!r}")
        return self._curves[metric]

    def plot(self, path: str | Path | None = None, metric: str | None = None) -> Any:
        """Draws mean and worst 10 %, and the fairness angle below, over the rounds.

        Args:
            path: file to write; its suffix chooses the format.
            metric: which metric; by default the first where larger is better, or else the first.

        Returns:
            The matplotlib ``Figure``.

        Raises:
            ValueError: nothing has been recorded, or not for this metric.
            ImportError: matplotlib, which the extra ``plots`` brings, is missing.
        """
        if not self._curves:
            raise ValueError("plot needs at least one validation with per-client values, found none")
        name = metric if metric is not None else next(filter(self._is_larger_better, self._curves), self.metrics[0])
        curve, angles = self.curves(name), self._is_larger_better(name)
        with new_figure("FairnessMonitor.plot", 6.4, 5.2 if angles else 3.4, path) as figure:
            upper, *lower = figure.subplots(2 if angles else 1, 1, sharex=True, squeeze=False)[:, 0]
            upper.set_title("Mean and worst clients over the rounds")
            upper.plot(curve.rounds, curve.mean, label="mean over the clients")
            upper.plot(curve.rounds, curve.worst_10, linestyle="--", color="C0", label="mean of the worst 10 %")
            upper.set_ylabel(name)
            upper.legend()
            for axes in lower:
                axes.plot(curve.rounds, curve.angle)
                axes.set_ylabel("fairness angle (rad)\n0: all clients alike")
                axes.set_ylim(bottom=0)
            figure.axes[-1].set_xlabel("round")
        return figure

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses strategies that are not federated."""
        records(trainer, self)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets an earlier fit unless this one continues it."""
        if is_fresh_fit(trainer):
            self._curves.clear()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds a point to each metric's curves."""
        record = evaluation(trainer, self, "val")
        if record is None or not is_fitting(trainer):
            return
        for curve in self._curves.values():
            _cut(curve, record.round)
        for name in record.values:
            self._modes[name] = record.mode(name)
            summary = record.summary(name, self._mode(name))
            curve = self._curves.setdefault(name, FairnessCurve())
            curve.rounds.append(record.round)
            curve.mean.append(float(summary["mean"]))
            curve.angle.append(float(summary["angle"]) if "angle" in summary else float("nan"))
            curve.worst_10.append(float(summary["worst_10"]))

    def state_dict(self) -> dict[str, Any]:
        """The curves, as lists of numbers."""
        return {"curves": {name: asdict(curve) for name, curve in self._curves.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._curves = {
            name: FairnessCurve(**{key: list(values) for key, values in curve.items()})
            for name, curve in state_dict["curves"].items()
        }

    def _mode(self, name: str) -> Mode:
        if name in self.larger_is_better:
            return "max" if self.larger_is_better[name] else "min"
        return self._modes.get(name) or guessed_mode(name)

    def _is_larger_better(self, name: str) -> bool:
        return self._mode(name) == "max"


def _cut(curve: FairnessCurve, first: int) -> None:
    """Removes the points from round ``first`` on."""
    keep = sum(number < first for number in curve.rounds)  # rounds ascend
    for values in (curve.rounds, curve.mean, curve.angle, curve.worst_10):
        del values[keep:]
