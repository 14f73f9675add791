# SPDX-License-Identifier: Apache-2.0
"""FedLF (AAAI 2024): Table 3, its variants, and the fair-driven row where it is needed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

from torch import Tensor

import fl_lightning as fl
from benchmarks.papers.experiment import Experiment
from benchmarks.papers.federated import FederatedCase, Training
from benchmarks.papers.networks import cifar_cnn, mlp
from benchmarks.papers.sources import CIFAR10, FASHION
from benchmarks.papers.tables.fedlf import CODED, LR, ONLINE, PARTITIONS, ROUNDS, Rule
from benchmarks.papers.tasks import Images
from fl_lightning.algorithms import FedAvg, Federation, FedLF
from fl_lightning.data import IID, Dirichlet, Partition


class Fragments(FedLF):
    """FedLF on pieces of equal size in place of layers (M3)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def begin_fit(self, federation: Federation) -> None:
        """With a layout of pieces."""
        super().begin_fit(replace(federation, layout=self._pieces(federation.layout.numel)))

    def aggregate(self, cohort: fl.Cohort) -> Tensor:
        """With updates in pieces."""
        pieces = fl.UpdateMatrix(cohort.updates.rows, self._pieces(cohort.updates.layout.numel))
        step = super().aggregate(replace(cohort, updates=pieces))
        of_pieces = ("merged_layers", "block_conflicts")  # which are no layers
        scalars = {name: value for name, value in self.report.scalars.items() if name not in of_pieces}
        self.report = replace(self.report, scalars=scalars)
        return step

    def _pieces(self, numel: int) -> fl.ParamLayout:
        cuts = [numel * piece // self.count for piece in range(self.count + 1)]
        return fl.ParamLayout.from_sizes([stop - start for start, stop in pairwise(cuts)])


class NoFairRow(FedLF):
    """FedLF without the fair-driven row (M4)."""

    _fair_kind = "none"


class FairRowOfFedMDFG(FedLF):
    """FedLF with FedMDFG's row in place of the fair-driven one (M5)."""

    _fair_kind = "h"


ABLATION_RULES: dict[str, tuple[Rule, float, float]] = {
    "FedLF": (FedLF, 0.896, 0.052),
    "M1, mean": (partial(FedAvg, "uniform"), 0.849, 0.104),
    "M2, one block": (partial(FedLF, layers="model"), 0.880, 0.062),
    "M3, fragments": (partial(Fragments, 3), 0.882, 0.061),
    "M4, no fair row": (NoFairRow, 0.878, 0.061),
    "M5, row of FedMDFG": (partial(FairRowOfFedMDFG, reading="paper"), 0.890, 0.055),
    "M6, no history": (partial(FedLF, history_window="none"), 0.874, 0.091),
    "M7, last round": (partial(FedLF, history_window="last"), 0.884, 0.058),
    "M8, all absent": (partial(FedLF, history_window="all"), 0.887, 0.064),
    "FedLF, rows as they are": (partial(FedLF, reading="paper"), 0.896, 0.052),
}

CIFAR_RULES: dict[str, tuple[Rule, float, float]] = {
    "FedLF": (FedLF, 0.766, 0.106),
    "M2, one block": (partial(FedLF, layers="model"), 0.736, 0.117),
}

NOT_BEHIND = ("FedLF", "M2, one block", "M3, fragments", "M7, last round", "M8, all absent")  # with Pat-2


def _ablation() -> list[FederatedCase]:
    def scored(rules: dict[str, tuple[Rule, float, float]]) -> dict[str, tuple[Rule, dict[str, float]]]:
        return {label: (rule, {"mean": mean, "angle": angle}) for label, (rule, mean, angle) in rules.items()}

    one_class = {label: (ABLATION_RULES[label][0], dict[str, float]()) for label in NOT_BEHIND}
    groups = (
        ("", Images(FASHION, PARTITIONS["Pat-2"]), mlp, 50, scored(ABLATION_RULES)),
        ("Neighbouring classes: ", Images(FASHION, CODED["Pat-2"][1]), mlp, 50, scored(ABLATION_RULES)),
        ("Pat-1: ", Images(FASHION, PARTITIONS["Pat-1"]), mlp, 50, one_class),
        ("CIFAR-10: ", Images(CIFAR10, PARTITIONS["Pat-2"]), cifar_cnn, 10, scored(CIFAR_RULES)),
    )
    return [
        FederatedCase(
            f"{prefix}{label}", task, network, rule, Training(ONLINE, 200, LR), ROUNDS, every, published=published
        )
        for prefix, task, network, every, rules in groups
        for label, (rule, published) in rules.items()
    ]


ABLATION = Experiment(
    "fedlf-ablation",
    "FedLF, Table 3 (Pat-2), and Pat-1: variants of FedLF, batches of 200",
    tuple(_ablation()),
    metrics=("mean", "angle", "per_round_merged", "per_round_flagged"),
    last=5,
    deviations=(
        "The figures are means over the last five evaluations, which are 50 rounds apart, on CIFAR-10 10. One learning "
        "rate, .1 x .999^t. The published test images, divided by class.",
        "With rows of equal length, the library's default, the fair rows of FedLF and FedMDFG are one: M5 is run with "
        "rows as they are, and stands beside `FedLF, rows as they are`.",
        "M3 cuts the parameters into three pieces of equal size; the paper does not say how many it takes.",
        "`Neighbouring classes` divides as the published code does: Pat-2 is always {0, 1}, {2, 3} and so on.",
        "`Pat-1`, one class per client, is not in the table: it has the variants that Pat-2 does not tell from FedLF.",
    ),
)

FAIR_ROW_RULES: dict[str, Rule] = {
    "FedAvg": FedAvg,
    "FedLF": FedLF,
    "FedLF, fair row if needed": partial(FedLF, fair_row="needed"),
}
DIVISIONS: dict[str, Partition] = {
    "IID": IID(100),
    "Dir(1)": Dirichlet(100, 1.0),
    "Pat-2": PARTITIONS["Pat-2"],
    "Pat-1": PARTITIONS["Pat-1"],
}

FAIR_ROW = Experiment(
    "fedlf-fair-row",
    "FedLF's fair-driven row where it is needed: Fashion-MNIST, 10 of 100 clients, 50 rounds; no paper has this table",
    tuple(
        FederatedCase(
            f"{name}: {label}", Images(FASHION, divided), mlp, rule, Training(ONLINE, 50, LR, 1.0), 50, 5, (0, 1, 2)
        )
        for name, divided in DIVISIONS.items()
        for label, rule in FAIR_ROW_RULES.items()
    ),
    metrics=("mean", "worst_10", "angle", "per_round_fair_layers", "per_round_conflicts", "per_round_block_conflicts"),
    last=5,
)
