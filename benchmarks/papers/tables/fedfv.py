# SPDX-License-Identifier: Apache-2.0
"""FedFV (IJCAI 2021), Table 3: three clients with a class of Fashion-MNIST each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import fl_lightning as fl
from benchmarks.papers.experiment import Experiment
from benchmarks.papers.federated import FederatedCase, Training
from benchmarks.papers.networks import SoftmaxRegression, three_mlp
from benchmarks.papers.sources import FASHION
from benchmarks.papers.tasks import Classes
from fl_lightning.algorithms import Needs, ServerRule

SHIRT, PULLOVER, T_SHIRT = 6, 2, 0


A = fl.algorithms
RULES: dict[str, tuple[Callable[[], ServerRule], float, float, float]] = {
    "FedAvg": (A.FedAvg, 0.8042, 0.1150, 0.6426),
    "AFL .01": (partial(A.AFL, 0.01), 0.7909, 0.0576, 0.7109),
    "AFL .1": (partial(A.AFL, 0.1), 0.7813, 0.0127, 0.7634),
    "AFL .5": (partial(A.AFL, 0.5), 0.7814, 0.0112, 0.7657),
    "q-FedAvg 5": (partial(A.QFedAvg, 5.0), 0.7853, 0.0516, 0.7129),
    "q-FedAvg 15": (partial(A.QFedAvg, 15.0), 0.7106, 0.0746, 0.6069),
    "FedFa": (partial(A.FedFa, 0.5, 0.5), 0.8021, 0.1168, 0.6380),
    "FedMGDA+ .05": (partial(A.FedMGDAPlus, 0.05), 0.6716, 0.2339, 0.4463),
    "FedMGDA+ .1": (partial(A.FedMGDAPlus, 0.1), 0.7933, 0.0645, 0.7226),
    "FedMGDA+ 1": (partial(A.FedMGDAPlus, 1.0), 0.7929, 0.0642, 0.7246),
    "FedFV 0": (partial(A.FedFV, 0.0, 0), 0.8048, 0.1376, 0.6106),
    "FedFV 1/3": (partial(A.FedFV, 1 / 3, 0), 0.7961, 0.0191, 0.7709),
    "FedFV 2/3": (partial(A.FedFV, 2 / 3, 0), 0.8028, 0.0177, 0.7791),
}
"""Rule, and the published mean, standard deviation and lowest of the three accuracies."""

CLASSES = (SHIRT, PULLOVER, T_SHIRT)
TRAINING = Training(online=1.0, batch_size=60000, lr=0.1, decay=1.0)


class LossesAfter(A.QFedAvg):
    """q-FedAvg with the clients' losses after local training, where the first public code measured them."""

    def __init__(self, q: float) -> None:
        super().__init__(q)
        self.needs = self.needs | Needs(requery=True)

    def aggregate(self, cohort: fl.Cohort) -> Tensor:
        """With other losses."""
        assert cohort.losses_at is not None
        own = [cohort.losses_at(cohort.params - row)[i] for i, row in enumerate(cohort.updates.rows)]
        return super().aggregate(replace(cohort, losses=torch.stack(own)))


FURTHER: dict[str, tuple[Callable[[], ServerRule], str]] = {
    "q-FedAvg 5, losses after local training": (partial(LossesAfter, 5.0), "q-FedAvg 5"),
    "q-FedAvg 15, losses after local training": (partial(LossesAfter, 15.0), "q-FedAvg 15"),
    "FedFa, equal accuracies": (partial(A.FedFa, 1.0), "FedFa"),
}
"""What the first public code did otherwise. It measured FedFa's accuracies after local training, too, where a client
with a single class has 100 %; ``beta = 1`` leaves accuracies out, and participation is equal here."""


def _cases() -> list[FederatedCase]:
    recorded, written = [], []
    for label, (rule, mean, std, lowest) in RULES.items():
        published = {"mean": mean, "std": std, "min": lowest}
        case = FederatedCase(
            f"as recorded: {label}",
            Classes(FASHION, CLASSES, recorded=True),
            SoftmaxRegression,
            rule,
            TRAINING,
            rounds=200,
            every=10,
            seeds=(0, 1, 2, 3, 4),
            published=published,
            classes=len(CLASSES),
        )
        recorded.append(case)
        written.append(replace(case, name=f"as written: {label}", task=Classes(FASHION, CLASSES), network=three_mlp))
    by_name = {case.label: case for case in recorded}
    further = [
        replace(by_name[base], name=f"as recorded, other forms: {label}", rule=rule)
        for label, (rule, base) in FURTHER.items()
    ]
    return recorded + further + written


TABLE3 = Experiment(
    "fedfv-table3",
    "FedFV, Table 3: shirt, pullover and T-shirt of Fashion-MNIST, three clients, 200 full-batch rounds",
    tuple(_cases()),
    metrics=("mean", "std", "min"),
    deviations=(
        "The paper writes of a network with two hidden layers and of 80 % of local data for training and 20 % for the "
        "test. The authors' repository holds the records of the very runs of Table 3 (`task/fmnist/record`) and what "
        "made them: logistic regression whose probabilities go through a second softmax in the loss, pixels "
        "standardised one by one, 80 % of the 7,000 images of a class for training and 10 % for the test.",
        "`as recorded`: that setting. `as written`: an MLP with two hidden layers of 200, pixels in [0, 1], the "
        "published training and test images kept apart.",
        'The paper\'s column "Var." is a standard deviation in percentage points; here `std`, as a share. `min` is '
        "the mean over seeds of the lowest accuracy; beside it stands the lowest of the published means.",
    ),
)
