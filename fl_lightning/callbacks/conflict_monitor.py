# SPDX-License-Identifier: Apache-2.0
"""Which rounds work against some of their clients, on the model and in its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from fl_lightning.arguments import Bounds, checked
from fl_lightning.callbacks._federated import is_fitting, is_fresh_fit, records
from fl_lightning.core.lightning.names import Callback, LightningModule, Trainer


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


class ConflictMonitor(Callback):
    """Keeps every round's conflict counts in memory and sums them up.

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
