# SPDX-License-Identifier: Apache-2.0
"""FedHEAL (CVPR 2024): Tables 2, 3 and 5 on Office-Caltech-10, and two of the four digit domains."""

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

Figures = tuple[float, float]
"""Mean and sample standard deviation over the domains."""

BASES: dict[str, tuple[Rule, tuple[Figures, Figures, Figures, Figures]]] = {
    "FedAvg": (A.FedAvg, ((0.5835, 0.1113), (0.5883, 0.0784), (0.5728, 0.0573), (0.6485, 0.0380))),
    "FedProx": (
        partial(A.FedProx, 0.01),
        ((0.5842, 0.1003), (0.6062, 0.0657), (0.6111, 0.0823), (0.6597, 0.0630)),
    ),
    "SCAFFOLD": (A.SCAFFOLD, ((0.5862, 0.0950), (0.5954, 0.0745), (0.6154, 0.0840), (0.6242, 0.0537))),
    "MOON": (A.MOON, ((0.6021, 0.1108), (0.6251, 0.0571), (0.6124, 0.0499), (0.6407, 0.0362))),
    "FedDyn": (A.FedDyn, ((0.6024, 0.0928), (0.5991, 0.0784), (0.6012, 0.0576), (0.6050, 0.0526))),
    "FedProc": (A.FedProc, ((0.5227, 0.0695), (0.5096, 0.0514), (0.5357, 0.0994), (0.6294, 0.0487))),
    "FedProto": (A.FedProto, ((0.5918, 0.1204), (0.6621, 0.1101), (0.6859, 0.1199), (0.7430, 0.0644))),
}
"""Base method, and the figures without, with AFL, with q-FFL and with FedHEAL."""

ADDED: dict[str, Rule] = {"AFL": partial(A.AFL, 0.01), "q-FFL": partial(A.QFedAvg, 0.1)}
ADDED["FedHEAL"] = partial(A.FedHEAL, 0.4)

OTHERS: dict[str, tuple[Rule, Figures]] = {
    "Ditto": (partial(A.Ditto, 0.1), (0.6192, 0.0620)),
    "FedFV": (partial(A.FedFV, 0.1, 1), (0.6241, 0.0672)),
    "FedHEAL, filter alone": (partial(A.FedHEAL, 0.4, adapt_weights=False), (0.6473, 0.0464)),
    "FedHEAL, weights alone": (partial(A.FedHEAL, filter_updates=False), (0.6019, 0.0605)),
}
"""Tables 3 and 5, without the rows that Table 2 has."""

SGD = Training(1.0, 16, lr=0.001, decay=1.0, epochs=5, momentum=0.9, weight_decay=1e-5)
SMALL = Domains(OFFICE, each=5, share=0.1, side=48, train=1000, test=502)


def _office() -> list[FederatedCase]:
    cases = []
    for label, (rule, figures) in BASES.items():
        base = FederatedCase(
            f"Office-Caltech: {label}",
            SMALL,
            flipping_resnet,
            rule,
            SGD,
            rounds=60,
            every=1,
            seeds=(0, 1, 2),
            published=_published(figures[0]),
        )
        cases.append(base)
        for (name, added), known in zip(ADDED.items(), figures[1:], strict=True):
            if (label, name) == ("FedDyn", "q-FFL"):
                continue  # refused: FedDyn adds its state to a mean of models, and q-FFL's step is none
            client = None if rule is A.FedAvg else rule
            cases.append(
                replace(base, name=f"{base.name} + {name}", rule=added, client=client, published=_published(known))
            )
    return cases


def _published(figures: Figures) -> dict[str, float]:
    return {"mean": figures[0], "sample_std": figures[1]}


def _others() -> list[FederatedCase]:
    base = _office()[0]
    return [
        replace(base, name=f"Office-Caltech: {label}", rule=rule, published=_published(known))
        for label, (rule, known) in OTHERS.items()
    ]


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
    healed = replace(base, name="MNIST and USPS: FedAvg + FedHEAL", rule=A.FedHEAL)
    return [base, healed, alike, later]


def _large() -> list[FederatedCase]:
    cases = [case for case in _office() if case.label in ("FedAvg", "FedAvg + FedHEAL")]
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
    "FedHEAL, Tables 2, 3 and 5: accuracy per domain, mean and sample standard deviation over the domains",
    (*_office(), *_others(), *_digits(), *_large()),
    metrics=("mean", "sample_std", "min", "per_round_kept_share"),
    last=5,
    deviations=(
        "Office-Caltech: 48 x 48 pixels (paper 192), ResNet-10 of width 16 (64), 60 rounds (200) of 5 local epochs "
        "(10); clients, shares of the data, batches, learning rate and test images as published.",
        "MNIST and USPS: two of the paper's four digit domains, five clients each with one hundredth of the domain's "
        "training images, 16 x 16 pixels (32), width 16, 60 rounds of 2 local epochs, no random crops. The paper has "
        "no figures for two domains.",
        "FedDyn with q-FFL is refused: FedDyn adds its state to a mean of the models, and q-FFL's step is none.",
        "FedProx with mu = .01, AFL with .01, q-FFL with q = .1, Ditto with lambda = .1 (its global model, as in the "
        "paper), FedFV with alpha = .1 and tau = 1. Hyper-parameters of these methods are not published.",
        "Means over the last five evaluations. `min` is the worst domain. `per_round_kept_share`: share of the "
        "parameters' changes that FedHEAL's filter kept, over all rounds and clients.",
    ),
)
