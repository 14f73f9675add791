# SPDX-License-Identifier: Apache-2.0
"""FedLF (AAAI 2024): Table 1 on CIFAR-10 and CIFAR-100, Figures 3 and 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.papers.experiment import Experiment
from benchmarks.papers.federated import FederatedCase, Training
from benchmarks.papers.networks import cifar_cnn, mlp, narrow_cifar_cnn, nf_resnet, nf_resnet_of_ten
from benchmarks.papers.records import Line
from benchmarks.papers.sources import CIFAR10, CIFAR100, FASHION
from benchmarks.papers.tables.fedlf import CLIENTS, LR, ONLINE, PARTITIONS, ROUNDS, RULES
from benchmarks.papers.tasks import Images
from fl_lightning.data import Dirichlet, Pathological

# (mean accuracy, fairness angle) in the order of PARTITIONS: CIFAR-10, then CIFAR-100.
FIGURES = {
    "FedAvg": ((0.690, 0.214), (0.575, 0.341), (0.681, 0.276), (0.343, 0.201), (0.199, 0.667), (0.222, 0.604)),
    "qFedAvg": ((0.681, 0.204), (0.565, 0.301), (0.661, 0.267), (0.344, 0.196), (0.183, 0.690), (0.238, 0.529)),
    "FedProx": ((0.544, 0.242), (0.572, 0.205), (0.566, 0.212), (0.197, 0.291), (0.207, 0.617), (0.201, 0.538)),
    "AFL": ((0.679, 0.201), (0.561, 0.251), (0.685, 0.202), (0.382, 0.181), (0.177, 0.753), (0.261, 0.509)),
    "Ditto": ((0.598, 0.216), (0.463, 0.240), (0.553, 0.251), (0.301, 0.241), (0.070, 1.08), (0.114, 0.784)),
    "FedFV": ((0.682, 0.208), (0.568, 0.376), (0.681, 0.204), (0.339, 0.198), (0.191, 0.664), (0.229, 0.558)),
    "DRFL": ((0.692, 0.190), (0.578, 0.307), (0.684, 0.270), (0.341, 0.201), (0.193, 0.644), (0.228, 0.540)),
    "FedFa": ((0.653, 0.244), (0.482, 0.297), (0.695, 0.232), (0.387, 0.189), (0.114, 1.09), (0.222, 0.776)),
    "FedGini": ((0.698, 0.195), (0.587, 0.315), (0.672, 0.246), (0.349, 0.191), (0.203, 0.621), (0.198, 0.666)),
    "FedCKA": ((0.690, 0.205), (0.575, 0.341), (0.674, 0.211), (0.344, 0.201), (0.190, 0.691), (0.222, 0.575)),
    "FedMGDA+": ((0.531, 0.264), (0.440, 0.314), (0.569, 0.282), (0.173, 0.358), (0.035, 1.15), (0.080, 0.839)),
    "FedMDFG": ((0.729, 0.176), (0.744, 0.142), (0.714, 0.153), (0.387, 0.181), (0.278, 0.485), (0.332, 0.387)),
    "FedLF": ((0.766, 0.140), (0.765, 0.126), (0.761, 0.127), (0.420, 0.158), (0.409, 0.347), (0.413, 0.305)),
}
SETTINGS = {  # source, network, outputs, least samples per client
    "CIFAR-10": (CIFAR10, cifar_cnn, 10, 10),
    "CIFAR-100": (CIFAR100, nf_resnet, 100, 100),
}
SMALL = (0.1, 0.04)  # parts of a client's images that it trains on and tests on


def _table1() -> list[FederatedCase]:
    cases = []
    for row, (name, (source, network, classes, least)) in enumerate(SETTINGS.items()):
        for column, (division, partition) in enumerate(PARTITIONS.items()):
            divided = Dirichlet(CLIENTS, 0.1, min_size=least) if division.startswith("Dir") else partition
            for label, rule in RULES.items():
                known = dict(zip(("mean", "angle"), FIGURES[label][3 * row + column], strict=True))
                cases.append(
                    FederatedCase(
                        f"{name}, {division}: {label}",
                        Images(source, divided),
                        network,
                        rule,
                        Training(ONLINE, 50, LR),
                        ROUNDS,
                        every=50,
                        published=known,
                        classes=classes,
                    )
                )
    by_name = {case.name: case for case in cases}
    for division in ("Pat-1", "Pat-2"):
        for label in ("FedAvg", "FedFV", "FedMDFG", "FedLF"):
            whole = by_name[f"CIFAR-10, {division}: {label}"]
            small = Images(CIFAR10, PARTITIONS[division], own=SMALL)
            name = f"CIFAR-10, {division}, smaller: {label}"
            by_name[name] = replace(whole, name=name, task=small, network=narrow_cifar_cnn, rounds=200, every=20)
            cases.append(by_name[name])
    for label in ("FedAvg", "FedMDFG", "FedLF"):
        stand_in = replace(
            by_name[f"CIFAR-10, Pat-1, smaller: {label}"],
            name=f"CIFAR-10 for CIFAR-100, Pat-1: {label}",
            network=nf_resnet_of_ten,
            every=10,
            published={},
        )
        cases.append(stand_in)
    pairs = by_name["CIFAR-10, Pat-2: FedLF"]
    cases.append(replace(pairs, name="CIFAR-10, Pat-2: FedLF, NResNet-18", network=nf_resnet_of_ten, published={}))
    return cases


TABLE1 = Experiment(
    "fedlf-table1-cifar",
    "FedLF, Table 1 (CIFAR-10 and CIFAR-100): 100 clients, 10 per round, batches of 50, one local epoch",
    tuple(_table1()),
    metrics=("mean", "angle", "worst_5"),
    last=5,
    deviations=(
        "One learning rate, .1 x .999^t; the paper takes the best of .01, .05 and .1 for each method. Published test "
        "images, divided by class. Made for a GPU: `--accelerator gpu --jobs 4`.",
        "`smaller`: a quarter of the CNN's channels, a tenth of the images (others of the training ones for the test), "
        "200 rounds, learning rates and batches as published. The figures beside it are those of the whole setting.",
        "`NResNet-18` is what the authors coded, with 184,000 parameters on CIFAR-10. `CIFAR-10 for CIFAR-100` has it, "
        "with the images of `smaller`, for up to 200 rounds.",
    ),
)

CURVES = ("FedAvg", "FedProx", "FedFV", "FedMGDA+", "FedMDFG", "FedLF")


def _curves() -> list[FederatedCase]:
    groups = {"Pat-1": Pathological(10, 1), "Pat-2": Pathological(10, 2), "Pat-1, 100 clients": Pathological(100, 1)}
    whole = [
        FederatedCase(
            f"{group}: {label}", Images(CIFAR10, divided), cifar_cnn, RULES[label], Training(1.0, 200, LR), ROUNDS, 50
        )
        for group, divided in groups.items()
        for label in CURVES
    ]
    return whole + [
        replace(
            case,
            name=f"Fashion-MNIST, {case.name}",
            task=Images(FASHION, groups[case.group], own=SMALL),
            network=mlp,
            rounds=200,
            every=5,
        )
        for case in whole
    ]


def _draw_clients(results: Mapping[str, Mapping[int, list[Line]]], path: Path) -> None:
    """Each client's accuracy at the end, if they are few, and the mean accuracy and the angle over the rounds."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(name.rpartition(": ")[0] for name in results))
    figure = Figure(figsize=(13, 3.2 * len(groups)), layout="constrained")
    axes = figure.subplots(len(groups), 3, squeeze=False)
    for group, (bars, mean, angle) in zip(groups, axes, strict=True):
        named = {label: results[f"{group}: {label}"] for label in CURVES if f"{group}: {label}" in results}
        for number, (label, runs) in enumerate(named.items()):
            lines = next(iter(runs.values()))
            for axis, metric in ((mean, "mean"), (angle, "angle")):
                axis.plot([line["round"] for line in lines], [line[metric] for line in lines], label=label)
            places = [client + number / (len(named) + 1) for client in range(len(lines[-1].get("clients", [])))]
            bars.bar(places, sorted(lines[-1].get("clients", [])), 1 / (len(named) + 1), label=label)
        bars.set_xlabel("client, from the worst to the best")
        bars.set_ylabel(f"{group}\naccuracy")
        mean.set_ylabel("mean accuracy")
        angle.set_ylabel("fairness angle (rad)")
        mean.legend(fontsize="x-small")
    figure.savefig(path, dpi=90)


CLIENTS_OF_ALL = Experiment(
    "fedlf-figures",
    "FedLF, Figures 3 and 4: everybody online, batches of 200",
    tuple(_curves()),
    metrics=("mean", "angle", "min", "max"),
    draw=_draw_clients,
    deviations=(
        "One learning rate, .1 x .999^t. The paper draws these figures without numbers.",
        "`Fashion-MNIST`: in place of CIFAR-10, with the MLP and a tenth of the images (others of the training images "
        "for the test), 200 rounds.",
    ),
)
