# SPDX-License-Identifier: Apache-2.0
"""Methods with and without a guard, under attacks by none, a tenth and a fifth of the clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import fl_lightning as fl
from benchmarks.figures import new_figure
from benchmarks.papers.experiment import Experiment
from benchmarks.papers.federated import Attacks, FederatedCase, Training
from benchmarks.papers.networks import mlp
from benchmarks.papers.records import Line
from benchmarks.papers.report import final
from benchmarks.papers.sources import FASHION
from benchmarks.papers.tasks import Images
from fl_lightning.algorithms import ServerRule
from fl_lightning.algorithms.attacks import Attack
from fl_lightning.algorithms.guards import Guard
from fl_lightning.data import Shards
from fl_lightning.report.pictures import LIGHT

A, G = fl.algorithms, fl.guards
CLIENTS, ONLINE, CLASSES, ROUNDS = 100, 20, 10, 60
DECAY = 0.1 ** (1 / ROUNDS)  # the learning rate falls to a tenth, as on the leaderboard
ASSUMED = 0.3  # of a round's clients, that guards withstand: 20 of 100 give a round of 20 more than 6 in 6 % of rounds

Attacking = Callable[[tuple[int, ...]], Attack]

METHODS: dict[str, tuple[Callable[[], ServerRule], float]] = {
    "FedAvg": (A.FedAvg, 0.3),
    "q-FedAvg": (partial(A.QFedAvg, q=1.0), 0.3),
    "TERM": (A.TERM, 0.1),
    "FedMGDA+": (A.FedMGDAPlus, 0.3),
    "FedFV": (A.FedFV, 0.3),
    "FedMDFG": (A.FedMDFG, 1.0),
    "FedLF": (A.FedLF, 0.3),
    "FedHEAL": (A.FedHEAL, 0.3),
}
"""Rules and learning rates, those that the leaderboard's validation data picked on this data without attacks."""
GUARDS: dict[str, Callable[[], Guard] | None] = {
    "no guard": None,
    "clipped": G.AdaptiveNormClipping,
    "Multi-Krum": partial(G.MultiKrum, ASSUMED),
    "trimmed": partial(G.TrimmedMean, ASSUMED, rows="own"),
    "geometric median": partial(G.GeometricMedian, rows="own"),
}
ATTACKS: dict[str, Attacking] = {
    "false losses": partial(fl.attacks.FalseReports, loss_factor=10.0),
    "label flip": partial(fl.attacks.LabelFlip, num_classes=CLASSES),
    "ALIE": fl.attacks.ALIE,
    "inner products": partial(fl.attacks.InnerProductManipulation, epsilon=2.0),
    "model replacement": partial(fl.attacks.TargetedScaling, source=0, target=6, factor=10.0),
}
SHARES = (0.1, 0.2)


@dataclass(frozen=True)
class By:
    """An attack by a share of the clients, which the run's seed draws.

    Attributes:
        make: makes the attack from their ids.
        share: of the clients.
    """

    make: Attacking
    share: float

    def __call__(self, seed: int) -> Attack:
        """The attack of a run."""
        return self.make(fl.attacks.dishonest_clients(CLIENTS, self.share, seed))


def _situations() -> dict[str, Attacks | None]:
    attacked = {f"{name}, {share:.0%}": By(make, share) for name, make in ATTACKS.items() for share in SHARES}
    return {"clean": None, **attacked}


def _case(situation: str, attack: Attacks | None, method: str, guard: str) -> FederatedCase:
    rule, lr = METHODS[method]
    return FederatedCase(
        f"{situation}: {method}, {guard}",
        Images(FASHION, Shards(CLIENTS, 2)),
        mlp,
        rule,
        Training(ONLINE, 50, lr, DECAY),
        ROUNDS,
        every=20,
        attack=attack,
        honest_only=True,
        guard=GUARDS[guard],
    )


def _draw_accuracies(results: Mapping[str, Mapping[int, list[Line]]], path: Path) -> None:
    """Accuracies of honest clients at the end: a row per method and guard, a column per attack.

    A cell is empty where no run came to its end: a fit stops when updates are not finite any more.
    """
    order = [f"{method}, {guard}" for method in METHODS for guard in GUARDS]
    columns = list(dict.fromkeys(name.split(": ")[0] for name in results))
    rows = [row for row in order if any(f"{column}: {row}" in results for column in columns)]
    size = 2.4 + 0.8 * len(columns), 1.9 + 0.2 * len(rows)
    with new_figure(*size, path) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for panel, (metric, title) in zip(panels, (("mean", "mean"), ("worst_10", "worst tenth")), strict=True):
            cells = [[_at_end(results.get(f"{column}: {row}", {}), metric) for column in columns] for row in rows]
            panel.imshow(cells, cmap="Blues", aspect="auto", vmin=0, vmax=1)
            _write(panel, cells)
            panel.set_title(f"accuracy of honest clients, {title}", fontsize="small")
            panel.set_xticks(range(len(columns)), columns, rotation=40, ha="right", rotation_mode="anchor")
            panel.set_yticks(range(len(rows)), rows)
            panel.tick_params(length=0, labelsize="small")
            panel.grid(visible=False)
            for y, (above, below) in enumerate(pairwise(row.split(", ")[0] for row in rows)):
                if above != below:
                    panel.axhline(y + 0.5, color=LIGHT.paper, linewidth=4)


def _write(panel: Any, cells: Sequence[Sequence[float]]) -> None:
    """Writes the numbers into the cells that have one."""
    known = [(x, y, value) for y, line in enumerate(cells) for x, value in enumerate(line) if not isnan(value)]
    for x, y, value in known:
        ink = LIGHT.paper if value > 0.5 else LIGHT.ink
        panel.text(x, y, f"{value:.2f}".removeprefix("0"), ha="center", va="center", fontsize=7, color=ink)


def _at_end(runs: Mapping[int, list[Line]], metric: str) -> float:
    ends = [final(lines, metric, 1) for lines in runs.values() if lines[-1]["round"] == ROUNDS]
    return fmean(ends) if ends else nan


DEFENCES = Experiment(
    "defences",
    "Fashion-MNIST, 200 shards, 100 clients, 20 per round: honest clients behind guards, under attacks",
    tuple(
        _case(situation, attack, method, guard)
        for situation, attack in _situations().items()
        for method in METHODS
        for guard in GUARDS
    ),
    metrics=("mean", "angle", "worst_10", "per_round_dropped"),
    draw=_draw_accuracies,
    deviations=(
        "No paper has this table. Accuracies are those of honest clients, on published test images divided by the "
        "classes of the training data. Every method has the learning rate that the leaderboard picked without attacks.",
        f"Guards are set to withstand {ASSUMED:.0%} dishonest clients, also where there are fewer. Trimmed means and "
        "geometric medians leave clients' rows apart (rows='own').",
    ),
)
