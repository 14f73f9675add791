# SPDX-License-Identifier: Apache-2.0
"""FedHEAL (CVPR 2024): Table 2 on Office-Caltech-10, and two of the four digit domains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import fl_lightning as fl
from benchmarks.papers.experiment import Experiment
from benchmarks.papers.federated import FederatedCase, Training
from benchmarks.papers.networks import flipping_resnet, narrow_resnet, wide_resnet
from benchmarks.papers.sources import OFFICE
from benchmarks.papers.tasks import Domains
from fl_lightning.algorithms import ServerRule

A = fl.algorithms
Rule = Callable[[], ServerRule]

BASES: dict[str, tuple[Rule, tuple[float, float], tuple[float, float]]] = {
    "FedAvg": (A.FedAvg, (0.5835, 0.1113), (0.6485, 0.0380)),
    "FedProx": (partial(A.FedProx, 0.01), (0.5842, 0.1003), (0.6597, 0.0630)),
    "SCAFFOLD": (A.SCAFFOLD, (0.5862, 0.0950), (0.6242, 0.0537)),
}
"""Base method; mean and sample standard deviation over the domains without and with FedHEAL."""

SGD = Training(1.0, 16, lr=0.001, decay=1.0, epochs=5, momentum=0.9, weight_decay=1e-5)
SMALL = Domains(OFFICE, each=5, share=0.1, side=48, train=1000, test=502)


def _office() -> list[FederatedCase]:
    cases = []
    for label, (rule, plain, healed) in BASES.items():
        base = FederatedCase(
            f"Office-Caltech: {label}",
            SMALL,
            flipping_resnet,
            rule,
            SGD,
            rounds=60,
            every=1,
            seeds=(0, 1, 2),
            published={"mean": plain[0], "sample_std": plain[1]},
        )
        cases += [base, _healed(base, rule, 0.4, {"mean": healed[0], "sample_std": healed[1]})]
    return cases


def _healed(base: FederatedCase, rule: Rule, tau: float, published: dict[str, float]) -> FederatedCase:
    return replace(
        base,
        name=f"{base.name} + FedHEAL",
        rule=partial(A.FedHEAL, tau),
        client=None if rule is A.FedAvg else rule,
        published=published,
    )


def _digits() -> list[FederatedCase]:
    base = FederatedCase(
        "MNIST and USPS: FedAvg",
        Domains(("mnist", "usps"), each=5, share=0.01, side=16, train=3360, test=12007),
        narrow_resnet,
        A.FedAvg,
        replace(SGD, batch_size=64, epochs=2),
        rounds=60,
        every=2,
        seeds=(0, 1, 2),
    )
    alike = replace(base, name="MNIST and USPS: FedAvg, clients alike", rule=partial(A.FedAvg, "uniform"))
    later = replace(base, name="MNIST and USPS: FedPW", rule=A.FedPW)  # its paper compares it with both
    return [base, _healed(base, A.FedAvg, 0.3, {}), alike, later]


def _large() -> list[FederatedCase]:
    cases = [case for case in _office() if case.label.startswith("FedAvg")]
    return [
        replace(
            case,
            name=f"Office-Caltech, 96 x 96, full width: {case.label}",
            task=replace(SMALL, side=96),
            network=wide_resnet,
            seeds=(0,),
        )
        for case in cases
    ]


TABLE2 = Experiment(
    "fedheal",
    "FedHEAL, Table 2: accuracy per domain, mean and sample standard deviation over the domains",
    (*_office(), *_digits(), *_large()),
    metrics=("mean", "sample_std", "min", "per_round_kept_share"),
    last=5,
    deviations=(
        "Office-Caltech: 48 x 48 pixels (paper 192), ResNet-10 of width 16 (64), 60 rounds (200) of 5 local epochs "
        "(10); clients, shares of the data, batches, learning rate and test images as published.",
        "MNIST and USPS: two of the paper's four digit domains, five clients each with one hundredth of the domain's "
        "training images, 16 x 16 pixels (32), width 16, 60 rounds of 2 local epochs, no random crops. The paper has "
        "no figures for two domains.",
        "FedProx with mu = .01. Hyper-parameters of the base methods are not published.",
        "Means over the last five evaluations. `min` is the worst domain. `per_round_kept_share`: share of the "
        "parameters' changes that FedHEAL's filter kept, over all rounds and clients.",
    ),
)
