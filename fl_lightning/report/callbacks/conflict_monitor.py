# SPDX-License-Identifier: Apache-2.0
"""Which rounds work against some of their clients, on the model and in its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fl_lightning.arguments import Bounds, checked
from fl_lightning.lightning.names import Callback, LightningModule, Trainer
from fl_lightning.report.callbacks._federated import is_fitting, is_fresh_fit, records
from fl_lightning.report.figures import new_figure
from fl_lightning.report.style import LIGHT


@checked(
    round=Bounds(0), clients=Bounds(0), model=Bounds(0), layers=Bounds(0), blocks=Bounds(0), merged_layers=Bounds(0)
)
@dataclass(frozen=True)
class RoundConflicts:
    """Conflicts of one round; a client conflicts if its update has a negative inner product with the step.

    Attributes:
        round: index from 0.
        clients: clients whose updates were aggregated.
        model: clients in conflict on the whole model.
        layers: clients in conflict per layer, by layer name.
        blocks: conflicts added up over the blocks of layers that FedLF solved together; over layers for other rules.
        merged_layers: layers that FedLF solved together with a neighbour; 0 for other rules.
        flagged: the rule met a degenerate case and fell back.
    """

    round: int
    clients: int
    model: int
    layers: Mapping[str, int]
    blocks: int
    merged_layers: int
    flagged: bool


@checked(
    rounds=Bounds(1),
    clients=Bounds(0),
    model=Bounds(0),
    layers=Bounds(0),
    blocks=Bounds(0),
    merged=Bounds(0, 1),
    flagged=Bounds(0, 1),
    merged_or_flagged=Bounds(0, 1),
)
@dataclass(frozen=True)
class ConflictSummary:
    """Means over rounds; the counts of FedLF (AAAI 2024), Table 2.

    Attributes:
        rounds: rounds counted.
        clients: clients per round.
        model: clients in conflict on the whole model, per round.
        layers: clients in conflict per round, by layer name.
        blocks: conflicts added up over a round's blocks, per round; 0 if and only if no block ever had one.
        merged: share of the rounds with merged layers.
        flagged: share of the rounds that the rule flagged.
        merged_or_flagged: share of the rounds with either.
    """

    rounds: int
    clients: float
    model: float
    layers: Mapping[str, float]
    blocks: float
    merged: float
    flagged: float
    merged_or_flagged: float


_COLUMNS = 200


def _share(rounds: Sequence[RoundConflicts], layer: str | None) -> float:
    """Percent of the clients of some rounds that are in conflict, on the whole model or in a layer."""
    count = sum(entry.model if layer is None else entry.layers.get(layer, 0) for entry in rounds)
    return 100 * count / max(1, sum(entry.clients for entry in rounds))


class ConflictMonitor(Callback):
    """Keeps every round's conflict counts in memory, sums them up, and draws them.

    The counts travel with the checkpoint. A resumed fit continues them: entries of the round in hand and of later ones,
    left by an interrupted run, are replaced.

    Attributes:
        rounds: one entry per finished round, ascending.
    """

    def __init__(self) -> None:
        self.rounds: list[RoundConflicts] = []

    def summary(self) -> ConflictSummary:
        """Means over the rounds so far.

        Raises:
            ValueError: no round has finished.
        """
        if not self.rounds:
            raise ValueError("summary needs at least one finished round, found none")
        names = dict.fromkeys(name for entry in self.rounds for name in entry.layers)
        return ConflictSummary(
            rounds=len(self.rounds),
            clients=fmean(entry.clients for entry in self.rounds),
            model=fmean(entry.model for entry in self.rounds),
            layers={name: fmean(e.layers[name] for e in self.rounds if name in e.layers) for name in names},
            blocks=fmean(entry.blocks for entry in self.rounds),
            merged=fmean(entry.merged_layers > 0 for entry in self.rounds),
            flagged=fmean(entry.flagged for entry in self.rounds),
            merged_or_flagged=fmean(entry.merged_layers > 0 or entry.flagged for entry in self.rounds),
        )

    def plot(self, path: str | Path | None = None) -> Any:
        """Draws the share of each round's clients that are in conflict: on the whole model, and in each layer.

        In fits of more than 200 rounds, means over several rounds are drawn.

        Args:
            path: file to write; its suffix chooses the format.

        Returns:
            The matplotlib ``Figure``.

        Raises:
            ValueError: no round has finished.
            ImportError: matplotlib, which the extra ``plots`` brings, is missing.
        """
        if not self.rounds:
            raise ValueError("plot needs at least one finished round, found none")
        layers = tuple(dict.fromkeys(name for entry in self.rounds for name in entry.layers))
        rows = ("whole model", *layers)
        width = -(-len(self.rounds) // _COLUMNS)
        stretches = [self.rounds[start : start + width] for start in range(0, len(self.rounds), width)]
        shares = [[_share(stretch, name) for stretch in stretches] for name in (None, *layers)]
        with new_figure("ConflictMonitor.plot", 6.4, min(9.0, 2.0 + 0.3 * len(rows)), path) as figure:
            from matplotlib.colors import LinearSegmentedColormap

            axes = figure.subplots()
            first, last = self.rounds[0].round + 0.5, self.rounds[0].round + 0.5 + width * len(stretches)
            picture = axes.imshow(
                shares, cmap=LinearSegmentedColormap.from_list("conflicts", LIGHT.red), aspect="auto", vmin=0,
                extent=(first, last, len(rows) - 0.5, -0.5), interpolation="nearest",
            )  # fmt: skip
            step = -(-len(rows) // 30)
            axes.set_yticks(range(0, len(rows), step), rows[::step])
            axes.axhline(0.5, color=LIGHT.paper, linewidth=3)
            axes.grid(visible=False)
            axes.set_xlabel("round" if width == 1 else f"round (means over {width})")
            axes.set_title("Clients that the step works against")
            figure.colorbar(picture, ax=axes, label="% of the round's clients")
        return figure

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses strategies that are not federated."""
        records(trainer, self)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets an earlier fit unless this one continues it."""
        if is_fresh_fit(trainer):
            self.rounds.clear()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds the round already here: a checkpoint written after validation has to hold it."""
        if is_fitting(trainer) and not trainer.sanity_checking:
            self._add(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds the round that just finished."""
        self._add(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The counts, as dicts of numbers."""
        return {"rounds": [asdict(entry) for entry in self.rounds]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.rounds = [RoundConflicts(**entry) for entry in state_dict["rounds"]]

    def _add(self, trainer: Trainer) -> None:
        record = records(trainer, self).last_round
        if record is None:
            return
        self.rounds = [entry for entry in self.rounds if entry.round < record.round]
        self.rounds.append(
            RoundConflicts(
                round=record.round,
                clients=len(record.client_ids),
                model=int(record.conflicts),
                layers={name: int(count) for name, count in record.layer_conflicts.items()},
                blocks=int(record.scalars.get("block_conflicts", sum(record.layer_conflicts.values()))),
                merged_layers=int(record.scalars.get("merged_layers", 0)),
                flagged=bool(record.flagged),
            )
        )
