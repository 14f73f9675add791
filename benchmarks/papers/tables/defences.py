# SPDX-License-Identifier: Apache-2.0
"""Methods with and without a guard, under attacks by none, a tenth and a fifth of the clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import fl_lightning as fl
from benchmarks.papers.experiment import Experiment
from benchmarks.papers.federated import Attacks, FederatedCase, Training
from benchmarks.papers.networks import mlp
from benchmarks.papers.sources import FASHION
from benchmarks.papers.tasks import Images
from fl_lightning.algorithms import ServerRule
from fl_lightning.attacks import Attack
from fl_lightning.data import Shards
from fl_lightning.guards import Guard

A, G = fl.algorithms, fl.guards
CLIENTS, CLASSES, ROUNDS = 100, 10, 100
ASSUMED = 0.2  # share of dishonest clients that guards are set to withstand, whoever is there

Attacking = Callable[[tuple[int, ...]], Attack]

METHODS: dict[str, Callable[[], ServerRule]] = {
    "FedAvg": A.FedAvg,
    "q-FedAvg": partial(A.QFedAvg, q=1.0),
    "TERM": A.TERM,
    "FedMGDA+": partial(A.FedMGDAPlus, 0.1),
    "FedFV": partial(A.FedFV, 0.1, 1),
    "FedMDFG": A.FedMDFG,
    "FedLF": A.FedLF,
    "FedHEAL": A.FedHEAL,
}
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
    return FederatedCase(
        f"{situation}: {method}, {guard}",
        Images(FASHION, Shards(CLIENTS, 2)),
        mlp,
        METHODS[method],
        Training(1.0, 50),
        ROUNDS,
        every=10,
        attack=attack,
        honest_only=True,
        guard=GUARDS[guard],
    )


DEFENCES = Experiment(
    "defences",
    "Fashion-MNIST, 200 shards, 100 clients, all online: honest clients behind guards, under attacks",
    tuple(
        _case(situation, attack, method, guard)
        for situation, attack in _situations().items()
        for method in METHODS
        for guard in GUARDS
    ),
    metrics=("mean", "angle", "worst_10", "per_round_dropped"),
    deviations=(
        "No paper has this table. Accuracies are those of honest clients, on published test images divided by the "
        "classes of the training data. One learning rate, .1 x .999^t, for all methods.",
        f"Guards are set to withstand {ASSUMED:.0%} dishonest clients, also where there are fewer. Trimmed means and "
        "geometric medians leave clients' rows apart (rows='own').",
    ),
)
