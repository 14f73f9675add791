# SPDX-License-Identifier: Apache-2.0
"""FedMDFG (AAAI 2023): Table 3, a client that overfits; Figures 3 and 4, one class per client; Figure 5, its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fl_lightning as fl
from benchmarks.papers.experiment import Experiment
from benchmarks.papers.federated import FederatedCase, Training
from benchmarks.papers.networks import cifar100_cnn, cifar_cnn, mlp, mnist_cnn, narrow_mnist_cnn
from benchmarks.papers.sources import CIFAR10, CIFAR100, FASHION, MNIST
from benchmarks.papers.tables.fedmdfg import RULES
from benchmarks.papers.tasks import Images
from fl_lightning.algorithms import ServerRule
from fl_lightning.data import Mutex

A = fl.algorithms
ALL = Training(1.0, 200)
ALONE = 50  # epochs of the client that comes first

# Mean accuracy, angle, worst and best client.
TABLE3_FIGURES = {
    "FedAvg": (0.325, 0.467, 0.055, 0.580),
    "AFL": (0.100, 1.25, 0.000, 1.00),
    "qFedAvg": (0.472, 0.357, 0.178, 0.742),
    "FedFV": (0.309, 0.235, 0.173, 0.432),
    "TERM": (0.396, 0.233, 0.209, 0.504),
    "Ditto": (0.369, 0.304, 0.203, 0.542),
    "FedMGDA+": (0.100, 1.25, 0.000, 1.00),
    "FedMDFG": (0.660, 0.075, 0.565, 0.714),
}


def overfit(module: fl.ClientModule, data: fl.FederatedDataModule) -> None:
    """Trains on the first client's data alone."""
    data.setup("fit")
    optimizer = torch.optim.SGD(module.parameters(), lr=ALL.lr)
    for _ in range(ALONE):
        for (images, labels), *_ in data.train_dataloader().batches(0, seed=None):
            optimizer.zero_grad()
            cross_entropy(module(images), labels).backward()
            optimizer.step()


def _overfitted() -> list[FederatedCase]:
    cases = []
    for label, figures in TABLE3_FIGURES.items():
        known = dict(zip(("mean", "angle", "min", "max"), figures, strict=True))
        whole = FederatedCase(
            label, Images(CIFAR10, Mutex(10)), cifar_cnn, RULES[label], ALL, 3000, 50, published=known, start=overfit
        )
        small = Images(FASHION, Mutex(10), own=(0.1, 0.02))
        cases += [whole, replace(whole, name=f"smaller: {label}", task=small, network=mlp, rounds=200, every=20,
                                 published={})]  # fmt: skip
    return cases


TABLE3 = Experiment(
    "fedmdfg-table3",
    "FedMDFG, Table 3: a client with one class overfits for 50 epochs, then nine others join",
    tuple(sorted(_overfitted(), key=lambda case: case.group)),
    metrics=("mean", "angle", "min", "max"),
    deviations=(
        "One learning rate, .1 x .999^t. Published test images, divided by class.",
        "`smaller`: Fashion-MNIST and the MLP, a tenth of the images (others of the training images for the test), 200 "
        "rounds. It has other levels than CIFAR-10; what can be compared is who gets away from the start.",
    ),
)

CURVES: dict[str, tuple[Callable[[], ServerRule], int]] = {
    "FedAvg": (A.FedAvg, 1),
    "FedAvg, 10 epochs": (A.FedAvg, 10),
    "qFedAvg": (RULES["qFedAvg"], 1),
    "FedFV": (RULES["FedFV"], 1),
    "FedMGDA+": (RULES["FedMGDA+"], 1),
    "FedMDFG": (A.FedMDFG, 1),
}
SMALL_FASHION = Images(FASHION, Mutex(100), own=(0.1, 0.04))
SMALL_MNIST = Images(MNIST, Mutex(10), own=(0.02, 0.02))


def _curves() -> list[FederatedCase]:
    whole = [
        FederatedCase(
            f"MNIST: {label}", Images(MNIST, Mutex(10)), mnist_cnn, rule, replace(ALL, epochs=epochs), 3000, 50
        )
        for label, (rule, epochs) in CURVES.items()
    ]
    small = [
        replace(
            case, name=f"MNIST, smaller: {case.label}", task=SMALL_MNIST, network=narrow_mnist_cnn, rounds=60, every=5
        )
        for case in whole
    ]
    hundred = replace(whole[0], task=Images(CIFAR100, Mutex(100)), network=cifar100_cnn, classes=100, rounds=5000)
    online = {"all": 1.0, "10 %": 0.1, "50 %": 0.5}
    coloured = [
        replace(hundred, name=f"CIFAR-100, {name} online: {label}", rule=rule, training=replace(ALL, online=share))
        for name, share in online.items()
        for label, (rule, epochs) in CURVES.items()
        if epochs == 1
    ]
    stand_ins = [
        replace(case, name=f"Fashion-MNIST for {case.name}", task=SMALL_FASHION, network=mlp, classes=10, rounds=200,
                every=5)
        for case in coloured
        if "all" not in case.group
    ]  # fmt: skip
    return whole + small + coloured + stand_ins


FIGURES = Experiment(
    "fedmdfg-figures",
    "FedMDFG, Figures 3 and 4: one class per client, batches of 200",
    tuple(_curves()),
    metrics=("mean", "angle", "worst_10", "best_10"),
    deviations=(
        "One learning rate, .1 x .999^t. The paper draws these figures without numbers.",
        "`smaller`: a quarter of the CNN's channels, a fiftieth of the images (others of the training images for the "
        "test), 60 rounds.",
        "`for CIFAR-100`: ten clients per class of Fashion-MNIST with a tenth of their images, the MLP, 200 rounds.",
    ),
)


class MeanDirection(A.FedMDFG):
    """M1: the mean of the rows, and the line search along it."""

    def _direction(
        self, cohort: fl.Cohort, gram: Tensor, scale: Tensor, h: Tensor | None
    ) -> tuple[Tensor, bool, bool] | None:
        online = torch.where(torch.arange(len(scale)) < len(cohort), scale, 0.0)
        return online / (online > 0).sum(), h is not None, False


class OneLength(A.FedMDFG):
    """M2: steps as long as the learning rate, whatever becomes of the losses."""

    def __init__(self) -> None:
        super().__init__(s=0)

    def aggregate(self, cohort: fl.Cohort) -> Tensor:
        """The first trial is taken, as if all losses were 0 after it."""
        return super().aggregate(replace(cohort, losses_at=lambda params: torch.zeros(len(cohort))))


PARTS: dict[str, Callable[[], ServerRule]] = {
    "M0, FedMDFG": A.FedMDFG,
    "M1, mean": MeanDirection,
    "M2, no line search": OneLength,
    "M3, beta 0": partial(A.FedMDFG, beta=0.0),
    "M4, beta .5": partial(A.FedMDFG, beta=0.5),
}


def _parts() -> list[FederatedCase]:
    whole = [
        FederatedCase(f"{name}: {label}", Images(source, Mutex(10)), network, rule, ALL, 3000, 50)
        for name, source, network in (("Fashion-MNIST", FASHION, mlp), ("MNIST", MNIST, mnist_cnn))
        for label, rule in PARTS.items()
    ]
    small = Images(FASHION, Mutex(10), own=(0.1, 0.02))
    return whole + [
        replace(case, name=f"{case.group}, smaller: {case.label}", task=small, rounds=200, every=5)
        for case in whole
        if case.group == "Fashion-MNIST"
    ]


PARTED = Experiment(
    "fedmdfg-ablation",
    "FedMDFG, Figure 5: without its direction, its line search, and with other parameters of the Armijo condition",
    tuple(_parts()),
    metrics=("mean", "angle", "worst_10", "per_round_evaluations"),
    deviations=(
        "The paper draws this figure without numbers. One learning rate, .1 x .999^t.",
        "`smaller`: a tenth of the images (others of the training ones for the test), 200 rounds.",
        "`per_round_evaluations`: steps that the line search tried per round. Each costs a number down and one up.",
    ),
)
