# SPDX-License-Identifier: Apache-2.0
"""FedFV (IJCAI 2021): Table 2, CIFAR-10; Table 3, Fashion-MNIST; Table 4, the projecting order; Figure 2 on MNIST."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import fl_lightning as fl
from benchmarks.papers.experiment import Experiment
from benchmarks.papers.federated import FederatedCase, Training
from benchmarks.papers.networks import (
    SoftmaxRegression,
    cifar_mlp,
    cifar_mlp_twice,
    mnist_cnn,
    narrow_mnist_cnn,
    three_mlp,
)
from benchmarks.papers.sources import CIFAR10, FASHION, MNIST
from benchmarks.papers.tasks import Classes, Images
from fl_lightning.algorithms import Needs, ServerRule
from fl_lightning.data import Shards

SHIRT, PULLOVER, T_SHIRT = 6, 2, 0
SEEDS = (0, 1, 2, 3, 4)

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
            seeds=SEEDS,
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

CIFAR_RULES: dict[str, tuple[Callable[[], ServerRule], float, float, float, float]] = {
    "FedAvg": (A.FedAvg, 0.4685, 0.1257, 0.1984, 0.6928),
    "q-FedAvg .1": (partial(A.QFedAvg, 0.1), 0.4702, 0.1316, 0.1872, 0.7016),
    "q-FedAvg .2": (partial(A.QFedAvg, 0.2), 0.4691, 0.1309, 0.1888, 0.7016),
    "q-FedAvg 1": (partial(A.QFedAvg, 1.0), 0.4679, 0.1172, 0.2280, 0.6800),
    "q-FedAvg 2": (partial(A.QFedAvg, 2.0), 0.4636, 0.1085, 0.2464, 0.6680),
    "q-FedAvg 5": (partial(A.QFedAvg, 5.0), 0.4525, 0.0959, 0.2656, 0.6360),
    "FedFa": (partial(A.FedFa, 0.5, 0.5), 0.4643, 0.1279, 0.1928, 0.6936),
    "FedMGDA+ .01": (partial(A.FedMGDAPlus, 0.01), 0.4565, 0.1094, 0.2512, 0.6744),
    "FedMGDA+ .05": (partial(A.FedMGDAPlus, 0.05), 0.4558, 0.1098, 0.2512, 0.6776),
    "FedMGDA+ .1": (partial(A.FedMGDAPlus, 0.1), 0.4552, 0.1132, 0.2432, 0.6848),
    "FedMGDA+ .5": (partial(A.FedMGDAPlus, 0.5), 0.4534, 0.1163, 0.2400, 0.6864),
    "FedMGDA+ 1": (partial(A.FedMGDAPlus, 1.0), 0.4534, 0.1164, 0.2400, 0.6864),
    "FedFV .1, 0": (partial(A.FedFV, 0.1, 0), 0.4857, 0.1097, 0.2832, 0.6976),
    "FedFV .2, 0": (partial(A.FedFV, 0.2, 0), 0.4854, 0.1056, 0.2888, 0.6920),
    "FedFV .5, 0": (partial(A.FedFV, 0.5, 0), 0.4814, 0.1060, 0.2872, 0.6880),
    "FedFV .1, 1": (partial(A.FedFV, 0.1, 1), 0.4934, 0.1074, 0.2856, 0.7024),
    "FedFV .1, 3": (partial(A.FedFV, 0.1, 3), 0.5000, 0.1085, 0.2824, 0.7096),
    "FedFV .1, 10": (partial(A.FedFV, 0.1, 10), 0.5042, 0.0970, 0.3224, 0.6968),
}
"""Rule, and the published mean, standard deviation, worst and best 5 %."""

RECORDED_CIFAR = Images(CIFAR10, Shards(100, 2), own=(0.8, 0.1))
WRITTEN_CIFAR = Images(CIFAR10, Shards(100, 2), own=(0.8, 0.2))
FULL_BATCH = Training(online=0.1, batch_size=400, lr=0.1, decay=1.0)


def _cifar_cases() -> list[FederatedCase]:
    recorded = [
        FederatedCase(
            f"as recorded: {label}",
            RECORDED_CIFAR,
            cifar_mlp_twice,
            rule,
            FULL_BATCH,
            rounds=2000,
            every=100,
            seeds=SEEDS,
            published={"mean": mean, "std": std, "worst_5": worst, "best_5": best},
        )
        for label, (rule, mean, std, worst, best) in CIFAR_RULES.items()
    ]
    written = [
        replace(case, name=f"as written: {case.label}", task=WRITTEN_CIFAR, network=cifar_mlp) for case in recorded
    ]
    return recorded + written


TABLE2 = Experiment(
    "fedfv-table2",
    "FedFV, Table 2: CIFAR-10 in 200 shards, 100 clients of which 10 train, MLP, 2,000 full-batch rounds",
    tuple(_cifar_cases()),
    metrics=("mean", "std", "worst_5", "best_5"),
    deviations=(
        "The paper writes that 80 % of the local data are for training and 20 % for the test. The authors' repository "
        "holds the records of the runs of Table 2 (`task/cifar10/record`) and what made them: of the 500 published "
        "training images of a client it trains on 400 and tests on 50; the MLP ends in a softmax, and the loss takes "
        "another one.",
        "`as recorded`: that setting. `as written`: one softmax, 400 and 100 images.",
        'The paper\'s column "Var." is a standard deviation in percentage points; here `std`, as a share.',
    ),
)

ORDERS: dict[str, tuple[Callable[[], ServerRule], dict[str, float]]] = {
    "by loss": (partial(A.FedFV, 0.0, 0), {"Fashion-MNIST": 0.1376, "CIFAR-10": 0.1319}),
    "random": (partial(A.FedFV, 0.0, 0, order="random"), {"Fashion-MNIST": 0.2014, "CIFAR-10": 0.1412}),
    "reversed": (partial(A.FedFV, 0.0, 0, order="reversed"), {"Fashion-MNIST": 0.2205, "CIFAR-10": 0.1628}),
}
"""Rule, and the published standard deviations."""


def _ordered_cases() -> list[FederatedCase]:
    three = next(case for case in TABLE3.cases if case.name == "as recorded: FedFV 0")
    hundred = next(case for case in TABLE2.cases if case.name == "as recorded: FedFV .1, 0")
    assert isinstance(three, FederatedCase)
    assert isinstance(hundred, FederatedCase)
    slow = replace(hundred, rounds=1000, training=replace(FULL_BATCH, online=0.2, lr=0.01))
    return [
        replace(case, name=f"{group}: {label}", rule=rule, published={"std": stds[group]})
        for group, case in {"Fashion-MNIST": three, "CIFAR-10": slow}.items()
        for label, (rule, stds) in ORDERS.items()
    ]


TABLE4 = Experiment(
    "fedfv-table4",
    "FedFV, Table 4: the order in which updates are projected",
    tuple(_ordered_cases()),
    metrics=("std", "mean", "min"),
    deviations=(
        "Settings of the authors' records: those of Table 3 for Fashion-MNIST; for CIFAR-10 those of Table 2 with 20 "
        "of 100 clients, 1,000 rounds and the learning rate .01. No clients keep their updates (`alpha=0, tau=0`).",
    ),
)

CURVES: dict[str, Callable[[], ServerRule]] = {
    "FedAvg": A.FedAvg,
    "q-FedAvg 1": partial(A.QFedAvg, 1.0),
    "FedFa": partial(A.FedFa, 0.5, 0.5),
    "FedMGDA+ .1": partial(A.FedMGDAPlus, 0.1),
    "FedFV .1, 0": partial(A.FedFV, 0.1, 0),
    "FedFV .2, 3": partial(A.FedFV, 0.2, 3),
}


def _curves() -> list[FederatedCase]:
    divided = Shards(200, 2)
    whole = [
        FederatedCase(label, Images(MNIST, divided, own=(0.8, 0.2)), mnist_cnn, rule, TRAINING, 1000, 20, SEEDS)
        for label, rule in CURVES.items()
    ]
    batches = replace(TRAINING, online=0.1, batch_size=64)
    small = Images(MNIST, divided, own=(0.4, 0.1))
    return [replace(case, training=batches) for case in whole] + [
        replace(
            case,
            name=f"smaller: {case.name}",
            task=small,
            network=narrow_mnist_cnn,
            training=batches,
            every=5,
            rounds=60,
            seeds=(0,),
        )
        for case in whole
    ]


FIGURE2 = Experiment(
    "fedfv-figure2",
    "FedFV, Figure 2 (b): MNIST in 400 shards, 200 clients of which 20 train, CNN",
    tuple(_curves()),
    metrics=("mean", "std", "worst_5"),
    reach=0.5,
    deviations=(
        "Batches of 64 and the learning rate .1, of which the paper takes the best of several.",
        "`smaller`: a quarter of the CNN's channels, half of the training images, 60 rounds, one seed.",
        "`rounds to .5`: the first evaluation with this mean accuracy, of which one is made every 5 rounds.",
    ),
)
