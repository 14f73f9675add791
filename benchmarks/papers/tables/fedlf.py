# SPDX-License-Identifier: Apache-2.0
"""FedLF (AAAI 2024): Tables 1 to 3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

from torch import Tensor

import fl_lightning as fl
from benchmarks.papers.experiment import Experiment
from benchmarks.papers.federated import FederatedCase, Training
from benchmarks.papers.networks import cifar_cnn, mlp
from benchmarks.papers.sources import CIFAR10, FASHION
from benchmarks.papers.tasks import Images
from fl_lightning.algorithms import Federation, FedLF, ServerRule
from fl_lightning.data import Dirichlet, Pathological

A = fl.algorithms
Rule = Callable[[], ServerRule]
CLIENTS, ONLINE, ROUNDS = 100, 10, 3000

RULES: dict[str, Rule] = {
    "FedAvg": A.FedAvg,
    "qFedAvg": partial(A.QFedAvg, 0.1),
    "FedProx": partial(A.FedProx, 0.1),
    "AFL": partial(A.AFL, 0.01),
    "Ditto": partial(A.Ditto, 0.1),
    "FedFV": partial(A.FedFV, 0.1, 1),
    "DRFL": A.DRFL,
    "FedFa": A.FedFa,
    "FedGini": A.FedGini,
    "FedCKA": A.FedCKA,
    "FedMGDA+": partial(A.FedMGDAPlus, 0.1),
    "FedMDFG": A.FedMDFG,
    "FedLF": FedLF,
}
IMPORTANT = ("FedAvg", "FedFV", "FedMDFG", "FedLF")

PARTITIONS = {
    "Dir(0.1)": Dirichlet(CLIENTS, 0.1, min_size=10),
    "Pat-1": Pathological(CLIENTS, 1),
    "Pat-2": Pathological(CLIENTS, 2),
}

# (mean accuracy, fairness angle) on Fashion-MNIST in the order of PARTITIONS.
TABLE1_FIGURES = {
    "FedAvg": ((0.861, 0.116), (0.828, 0.170), (0.838, 0.135)),
    "qFedAvg": ((0.847, 0.133), (0.831, 0.161), (0.813, 0.118)),
    "FedProx": ((0.825, 0.121), (0.834, 0.142), (0.836, 0.105)),
    "AFL": ((0.865, 0.109), (0.829, 0.204), (0.854, 0.137)),
    "Ditto": ((0.820, 0.129), (0.749, 0.278), (0.815, 0.124)),
    "FedFV": ((0.850, 0.132), (0.836, 0.165), (0.853, 0.135)),
    "DRFL": ((0.861, 0.109), (0.855, 0.136), (0.847, 0.157)),
    "FedFa": ((0.844, 0.174), (0.815, 0.205), (0.836, 0.116)),
    "FedGini": ((0.867, 0.115), (0.839, 0.160), (0.837, 0.134)),
    "FedCKA": ((0.861, 0.117), (0.816, 0.227), (0.840, 0.129)),
    "FedMGDA+": ((0.809, 0.161), (0.750, 0.305), (0.815, 0.221)),
    "FedMDFG": ((0.873, 0.089), (0.863, 0.101), (0.874, 0.084)),
    "FedLF": ((0.892, 0.084), (0.894, 0.089), (0.898, 0.074)),
}

LR = 0.1
"""Learning rate, the best of .01, .05 and .1 after 200 rounds (``fedlf-rates``) for all methods but those below."""
OTHER_LR = {"FedCKA": 0.05, "Pat-1: FedFa": 0.01}


def _table1() -> list[FederatedCase]:
    cases = []
    for column, (name, partition) in enumerate(PARTITIONS.items()):
        for label, rule in RULES.items():
            mean, angle = TABLE1_FIGURES[label][column]
            cases.append(
                FederatedCase(
                    f"{name}: {label}",
                    Images(FASHION, partition),
                    mlp,
                    rule,
                    Training(ONLINE, 50, OTHER_LR.get(f"{name}: {label}", OTHER_LR.get(label, LR))),
                    ROUNDS,
                    every=50,
                    seeds=(0, 1, 2) if label in IMPORTANT else (0,),
                    published={"mean": mean, "angle": angle},
                )
            )
    return cases


class AFLByPlace(A.AFL):
    """AFL as published code for sampled cohorts has it: a weight is that of a place in the cohort, whoever has it."""

    def aggregate(self, cohort: fl.Cohort) -> Tensor:
        """See the base class."""
        places = len(cohort)
        return super().aggregate(replace(cohort, client_ids=tuple(range(places)), num_clients=places))


def _readings(cases: list[FederatedCase]) -> list[FederatedCase]:
    """Other readings of the paper: test data from the same draw, other gradients, weights and steps."""
    by_name = {case.name: case for case in cases}
    other: list[FederatedCase] = []
    for name, partition in PARTITIONS.items():
        for label in ("FedAvg", "FedLF"):
            case = by_name[f"{name}: {label}"]
            task = Images(FASHION, partition, merged=True)
            other.append(replace(case, name=f"{name}, other readings: {label}, merged data", task=task, seeds=(0,)))
        for label, rule in (
            ("FedLF, full gradients", partial(FedLF, gradient_source="full")),
            ("FedLF, rows as they are", partial(FedLF, equalise_layer_norm=False)),
            ("FedMDFG, local training", partial(A.FedMDFG, gradient_source="update")),
            ("AFL, weights by place", partial(AFLByPlace, 0.01)),
            ("FedMGDA+, server step 1", partial(A.FedMGDAPlus, 0.1, 1.0)),
        ):
            case = by_name[f"{name}: {label.partition(',')[0]}"]
            other.append(replace(case, name=f"{name}, other readings: {label}", rule=rule, seeds=(0,)))
    return other


def _one_client() -> list[FederatedCase]:
    """All images at one client: what the network can reach, on the published test images and on others."""
    alone, training = Dirichlet(1, 1.0), Training(1.0, 50, LR, decay=0.9)
    return [
        FederatedCase(
            f"One client: {name}", Images(FASHION, alone, merged), mlp, RULES["FedAvg"], training, 30, 1, (0, 1, 2)
        )
        for name, merged in (("published test images", False), ("merged data", True))
    ]


TABLE1 = Experiment(
    "fedlf-table1",
    "FedLF, Table 1 (Fashion-MNIST): 100 clients, 10 per round, batches of 50, one local epoch",
    (*_table1(), *_readings(_table1()), *_one_client()),
    metrics=("mean", "angle", "worst_5"),
    last=5,
    deviations=(
        "The figures are means over the last five evaluations, which are 50 rounds apart (of shorter runs: over "
        "those in the second half); the paper does not say which rounds its figures come from.",
        "Learning rate .1 x .999^t, for FedCKA .05 x .999^t: for each method that of .01, .05 and .1, among which the "
        "paper chooses too, with the best mean after 200 rounds of Pat-2 (`fedlf-rates`); for FedFa of each partition, "
        "which for Pat-1 is .01.",
        "The published test images go to clients by the classes that they train on. In `merged data`, as in the "
        "published code, training and test images are put together and each client keeps a seventh of its own. `One "
        "client` trains the network on all images, for 30 epochs with learning rate .1 x .9^t.",
        "FedMDFG sends full gradients, as in its paper; all others train locally, as in the paper of FedLF. The "
        "published code of FedLF uses full gradients, see `other readings`.",
        "AFL's weights are the clients' own; `weights by place`, as in the published code, mix those who take turns "
        "there. FedMGDA+ steps as far as the clients' learning rate, with `server step 1` ten times as far and "
        "without decay.",
        "FedProx, Ditto, FedCKA, FedFa, FedGini and DRFL are the methods of their own papers, which the published code "
        "does not implement (docs/methods); their figures are no targets. Ditto's row is its global model.",
    ),
)


def _rates() -> list[FederatedCase]:
    base = {case.name: case for case in _table1()}
    wanted = {label: f"Pat-2: {label}" for label in RULES}
    # Server momentum makes steps ten times longer: too long where clients have one class each.
    wanted |= {f"FedFa, {name}": f"{name}: FedFa" for name in ("Dir(0.1)", "Pat-1")}
    return [
        replace(
            base[name], name=f"{group}: {lr}", training=Training(ONLINE, 50, lr), rounds=200, seeds=(0,), published={}
        )
        for group, name in wanted.items()
        for lr in (0.01, 0.05, 0.1)
    ]


RATES = Experiment(
    "fedlf-rates",
    "Learning rates for FedLF's Table 1, chosen on 200 rounds of Pat-2, for FedFa of each partition",
    tuple(_rates()),
    last=2,
)

# Mean accuracy, angle, then clients in conflict per round in the model and in layers 1 to 5.
TABLE2_FIGURES = {
    "FedAvg": (0.440, 0.282, 2.4, 2.7, 2.6, 2.5, 2.3, 3.4),
    "FedFV": (0.418, 0.468, 1.9, 2.7, 2.7, 1.9, 2.6, 4.3),
    "FedMDFG": (0.723, 0.158, 0.0, 3.0, 2.5, 1.7, 2.8, 3.8),
    "FedLF": (0.752, 0.086, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
}
COUNTS = ("per_round_conflicts", *(f"per_round_layer{i}" for i in range(1, 6)))
TABLE2_PUBLISHED = {
    label: dict(zip(("mean", "angle", *COUNTS), figures, strict=True)) for label, figures in TABLE2_FIGURES.items()
}
TABLE2_RULES: dict[str, Rule] = {label: RULES[label] for label in TABLE2_FIGURES} | {
    "FedLF, one block": partial(FedLF, layers="model")
}

TABLE2 = Experiment(
    "fedlf-table2",
    "FedLF, Table 2 (CIFAR-10, Pat-1): clients in conflict with the step, per round, in the model and five layers",
    tuple(
        FederatedCase(
            label,
            Images(CIFAR10, Pathological(CLIENTS, 1)),
            cifar_cnn,
            rule,
            Training(ONLINE, 200, LR),
            ROUNDS,
            every=10,
            published=TABLE2_PUBLISHED.get(label, {}),
        )
        for label, rule in TABLE2_RULES.items()
    ),
    metrics=("mean", "angle", *COUNTS, "per_round_block_conflicts", "per_round_merged", "per_round_flagged"),
    deviations=(
        "Conflicts are counted on what the clients send: FedMDFG full gradients, the others updates.",
        "`per_round_block_conflicts` counts in the blocks that FedLF solved together, `per_round_merged` and "
        "`per_round_flagged` are shares of the rounds.",
        "One learning rate, .1 x .999^t.",
        "`FedLF, one block` is M2 of Table 3, one step for the model in place of one per layer; the table lacks it.",
    ),
)


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
        self.report = replace(self.report, blocks=None)
        return step

    def _pieces(self, numel: int) -> fl.ParamLayout:
        cuts = [numel * piece // self.count for piece in range(self.count + 1)]
        return fl.ParamLayout.from_sizes([stop - start for start, stop in pairwise(cuts)])


ABLATION_RULES: dict[str, tuple[Rule, float, float]] = {
    "FedLF": (FedLF, 0.896, 0.052),
    "M1, mean": (partial(A.FedAvg, "uniform"), 0.849, 0.104),
    "M2, one block": (partial(FedLF, layers="model"), 0.880, 0.062),
    "M3, fragments": (partial(Fragments, 3), 0.882, 0.061),
    "M4, no fair row": (partial(FedLF, fair_row="none"), 0.878, 0.061),
    "M5, row of FedMDFG": (partial(FedLF, fair_row="h", equalise_layer_norm=False), 0.890, 0.055),
    "M6, no history": (partial(FedLF, history_window="none"), 0.874, 0.091),
    "M7, last round": (partial(FedLF, history_window="last"), 0.884, 0.058),
    "M8, all absent": (partial(FedLF, history_window="all"), 0.887, 0.064),
    "FedLF, rows as they are": (partial(FedLF, equalise_layer_norm=False), 0.896, 0.052),
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
    last=5,
    deviations=(
        "The figures are means over the last five evaluations, which are 50 rounds apart, on CIFAR-10 10. One learning "
        "rate, .1 x .999^t. The published test images, divided by class.",
        "With rows of equal length, the library's default, the fair rows of FedLF and FedMDFG are one: M5 is run with "
        "rows as they are, and stands beside `FedLF, rows as they are`.",
        "M3 cuts the parameters into three pieces of equal size; the paper does not say how many it takes.",
        "`Pat-1`, one class per client, is not in the table: it has the variants that Pat-2 does not tell from FedLF.",
    ),
)
