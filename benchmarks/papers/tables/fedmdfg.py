# SPDX-License-Identifier: Apache-2.0
"""FedMDFG (AAAI 2023), Table 4: dishonest clients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import fl_lightning as fl
from benchmarks.papers.experiment import Experiment
from benchmarks.papers.federated import FederatedCase, Training
from benchmarks.papers.networks import mlp
from benchmarks.papers.sources import FASHION
from benchmarks.papers.tasks import Images
from fl_lightning.algorithms import ServerRule
from fl_lightning.data import Shards

A = fl.algorithms
CLIENTS, SHARE = 100, 0.1


def _ids(seed: int) -> tuple[int, ...]:
    return fl.attacks.dishonest_clients(CLIENTS, SHARE, seed)


def noise(seed: int) -> fl.attacks.Attack:
    """A1 with standard deviation 1."""
    return fl.attacks.RandomUpdates(_ids(seed), std=1.0)


def matched_noise(seed: int) -> fl.attacks.Attack:
    """A1 as long as the honest update."""
    return fl.attacks.RandomUpdates(_ids(seed), match_norm=True)


def random_model(seed: int) -> fl.attacks.Attack:
    """A1 as the published code does it where models are sent."""
    return fl.attacks.RandomModels(_ids(seed))


def empty_model(seed: int) -> fl.attacks.Attack:
    """A3 with parameters of zero in place of updates of zero."""
    return fl.attacks.RandomModels(_ids(seed), std=0.0)


def enlarged(seed: int) -> fl.attacks.Attack:
    """A2."""
    return fl.attacks.ScaledUpdates(_ids(seed), 100.0)


def zero(seed: int) -> fl.attacks.Attack:
    """A3."""
    return fl.attacks.ZeroUpdates(_ids(seed))


ATTACKS: dict[str, Callable[[int], fl.attacks.Attack] | None] = {
    "clean": None,
    "A1, standard deviation 1": noise,
    "A1, length of the update": matched_noise,
    "A2, 100 times": enlarged,
    "A3, zero": zero,
    "A1, random model": random_model,
    "A3, model of zeros": empty_model,
}
MODELS = ("FedAvg", "FedFV")
"""The methods whose clients send models: for them alone a model can be false."""

# (mean accuracy, fairness angle): clean, A1, A2, A3.
FIGURES = {
    "FedAvg": ((0.859, 0.100), (0.354, 0.665), (0.103, 1.10), (0.546, 0.330)),
    "FedFV": ((0.862, 0.091), (0.454, 0.487), (0.103, 1.10), (0.563, 0.385)),
    "FedMGDA+": ((0.714, 0.216), (0.674, 0.272), (0.714, 0.216), (0.103, 0.109)),
    "FedMDFG": ((0.875, 0.065), (0.875, 0.080), (0.876, 0.066), (0.866, 0.064)),
}
RULES: dict[str, Callable[[], ServerRule]] = {
    "FedAvg": A.FedAvg,
    "FedFV": partial(A.FedFV, 0.1, 1),
    "FedMGDA+": partial(A.FedMGDAPlus, 0.1),
    "FedMDFG": A.FedMDFG,
}
COLUMN = {"clean": 0, "A1": 1, "A2": 2, "A3": 3}


def _cases() -> list[FederatedCase]:
    cases = []
    for attack, make in ATTACKS.items():
        for label, rule in RULES.items():
            if make in (random_model, empty_model) and label not in MODELS:
                continue
            mean, angle = FIGURES[label][COLUMN[attack[:2]] if make else 0]
            cases.append(
                FederatedCase(
                    f"{attack}: {label}",
                    Images(FASHION, Shards(CLIENTS, 2)),
                    mlp,
                    rule,
                    Training(1.0, 50),
                    2000,
                    every=10,
                    published={"mean": mean, "angle": angle},
                    attack=make,
                )
            )
    return cases


ATTACKED = Experiment(
    "fedmdfg-attacks",
    "FedMDFG, Table 4 (Fashion-MNIST, 200 shards, 100 clients, all online): 10 % dishonest clients",
    tuple(_cases()),
    metrics=("mean", "angle", "worst_10", "per_round_dropped"),
    deviations=(
        "The number of rounds is not given for this table; 2000 is that of the other tables.",
        "The paper's A1 sends random parameters, or gradients, of unknown length. Its code draws parameters from "
        "N(0, 1) where models are sent (`random model`) and makes gradients as long as the honest ones (`length of the "
        "update`).",
        "`model of zeros` is not in the paper: it asks whether its A3 of FedAvg and FedFV was this.",
        "Accuracies are means over all 100 clients, dishonest ones included, on published test images divided by the "
        "classes of the training data. One learning rate, .1 x .999^t.",
    ),
)
