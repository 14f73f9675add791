# SPDX-License-Identifier: Apache-2.0
"""FedHEAL (CVPR 2024): Tables 2, 3 and 5 on Office-Caltech-10, two digit domains and two stand-ins, Figure 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import fl_lightning as fl
from benchmarks.papers.experiment import Experiment
from benchmarks.papers.federated import FederatedCase, Training
from benchmarks.papers.networks import flipping_resnet, narrow_resnet, tiny_resnet, wide_resnet
from benchmarks.papers.records import Line
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

FOUR = Domains(
    ("mnist", "usps", "uci", "rendered"), each=2, share=0.002, side=16, train=600, test=1660, least=60, tests=500
)
BETAS = {  # with the filter off; mean and sample standard deviation over the paper's four domains
    0.0: (0.7600, 0.2382),
    0.2: (0.7688, 0.2270),
    0.4: (0.7720, 0.2264),
    0.6: (0.7683, 0.2283),
    0.8: (0.7696, 0.2271),
    1.0: (0.7713, 0.2270),
}
TAUS = (0.1, 0.3, 0.5, 0.7, 0.9)


def _swept() -> list[FederatedCase]:
    rules: dict[str, tuple[Rule, dict[str, float]]] = {
        f"beta: {beta}": (partial(A.FedHEAL, beta=beta, filter_updates=False), _published(known))
        for beta, known in BETAS.items()
    }
    rules |= {f"tau: {tau}": (partial(A.FedHEAL, tau), {}) for tau in TAUS}
    known = {"Ditto": (0.7616, 0.2362), "FedFV": (0.7697, 0.2317)}  # Table 3
    rules |= {f"other: {label}": (OTHERS[label][0], _published(figures)) for label, figures in known.items()}
    training = replace(SGD, batch_size=64, lr=0.01, epochs=2)
    return [
        FederatedCase(label, FOUR, tiny_resnet, rule, training, 40, 4, (0, 1), figures)
        for label, (rule, figures) in rules.items()
    ]


SWEPT = Experiment(
    "fedheal-parameters",
    "FedHEAL, Tables 3 and 4, Figure 6: beta without the filter, tau with beta = .4, others, on four domains of digits",
    tuple(_swept()),
    metrics=("mean", "sample_std", "min", "per_round_kept_share"),
    last=5,
    deviations=(
        "MNIST and USPS are the paper's; the digits of scikit-learn stand for SVHN, digits rendered on noise for SYN.",
        "Two clients per domain with 60 training images each, of MNIST 120; 16 x 16 pixels, ResNet-10 of "
        "width 8, 40 rounds of two local epochs, learning rate .01, 500 test images per domain.",
        "Table 4's row for beta = 0 is FedAvg, so its filter was off. The figures beside ours are for other domains.",
    ),
)

BINS = 20
SPANS = (10, 100)  # rounds


def histogram(rule: A.FedHEAL) -> dict[str, float | list[float]]:
    """Shares of all parameters of all clients by how often their updates had the same sign, from .5 to 1."""
    shares = torch.cat([rule.sign_consistency(client) for client in rule.counts])
    counted = torch.histc(shares, BINS, 0.5, 1.0)
    return {"often": float((shares > 0.9).float().mean()), "histogram": (counted / len(shares)).tolist()}


def _draw_signs(results: Mapping[str, Mapping[int, list[Line]]], path: Path) -> None:
    """A histogram after 10 rounds and after 100."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, len(SPANS), sharey=True)
    by_chance = torch.distributions.Binomial
    for axis, span in zip(axes, SPANS, strict=True):
        lines = [line for runs in results.values() for run in runs.values() for line in run if line["round"] == span]
        if not lines:
            continue
        edges = [0.5 + 0.5 * (k + 0.5) / BINS for k in range(BINS)]
        chance = by_chance(span, torch.tensor(0.5)).log_prob(torch.arange(span + 1.0)).exp()
        same = (torch.arange(span + 1.0) / span - 0.5).abs() + 0.5
        places = ((same - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
        axis.bar(edges, lines[0]["histogram"], 0.45 / BINS, label="updates")
        axis.step(edges, torch.zeros(BINS).scatter_add_(0, places, chance), where="mid", color="0.4", label="by chance")
        axis.set_title(f"{span} rounds")
        axis.set_xlabel("share of rounds with the more frequent sign")
    axes[0].set_ylabel("share of the parameters")
    axes[0].legend()
    figure.savefig(path, dpi=110)


SIGNS = Experiment(
    "fedheal-signs",
    "FedHEAL, Figure 2: how often the updates of a parameter have the same sign, one client per domain",
    (
        FederatedCase(
            "Office-Caltech",
            replace(SMALL, each=1, side=32, train=200),
            tiny_resnet,
            partial(A.FedHEAL, 0.4),
            replace(SGD, epochs=2),
            max(SPANS),
            min(SPANS),
            noted=histogram,
        ),
    ),
    metrics=("often", "mean", "min"),
    draw=_draw_signs,
    deviations=(
        "32 x 32 pixels, ResNet-10 of width 8, two local epochs. All layers; the paper shows one drawn at random.",
        "`often`: share of the parameters whose updates had the same sign in more than 90 % of the rounds; of coins, "
        "none would have had it after 100 rounds.",
    ),
)
