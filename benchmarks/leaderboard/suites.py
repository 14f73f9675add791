# SPDX-License-Identifier: Apache-2.0
"""The suites: data, network, methods and rounds of one table each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L

import fl_lightning as fl
from benchmarks.leaderboard import adapter_tasks, data, networks
from benchmarks.leaderboard.adapters import AdapterLearner, ConflictCount, adapted
from benchmarks.leaderboard.learners import Learner, PeopleLearner
from benchmarks.leaderboard.methods import (
    FAIR_ROW,
    REFERENCE,
    Strategies,
    all_methods,
    arguments_of_fedfv,
    for_adapters,
    for_domains,
    server_steps,
    telling_methods,
    with_groups,
)
from benchmarks.leaderboard.text import CHARACTERS, CONTEXT
from benchmarks.papers.adult import Attribute
from benchmarks.papers.sources import CIFAR10, FASHION, OFFICE, Source
from fl_lightning.comparison.plan import BOUNDS, Bounding, Plan
from fl_lightning.data import Dirichlet, Pathological

RATES, SEEDS, TUNING_SEEDS, CURVE = (0.03, 0.1, 0.3, 1.0), 3, 1, 20
"""One grid for all methods; seeds of the table, and those that learning rates are picked with; points of a curve."""
LARGE_RATES = (1.0, 3.0, 10.0)
"""For suites whose methods pick the largest rate of the grid."""
FEWER_RATES = (0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Suite:
    """One table.

    Attributes:
        name: on the command line.
        title: heading of its table.
        rounds: of a run.
        module: makes what clients train from a network, rounds and a learning rate.
        network: in it.
        federate: reads and divides the data in a folder.
        methods: makes the strategies; the first is the reference.
        telling: the setting in words.
        rates: the learning rates that each method has to choose from.
        seeds: of the table.
        divisions: of the data; each runs with every seed.
        bounds: ``"local"``: the table says what each client reaches alone.
        callbacks: of its trainers.
        clients_of: an earlier suite with the same clients, whose table says what these reach alone; its name.
    """

    name: str
    title: str
    rounds: int
    module: Callable[..., Learner]
    network: Callable[[], Any]
    federate: Callable[[Path], fl.FederatedDataModule]
    methods: Callable[[], Strategies]
    telling: str
    rates: tuple[float, ...] = RATES
    seeds: int = SEEDS
    divisions: int = 1
    bounds: Bounding = "none"
    callbacks: tuple[L.Callback, ...] = ()
    clients_of: str = ""

    @property
    def plan(self) -> Plan:
        """All its runs."""
        methods = (*self.methods(), *BOUNDS[self.bounds])
        return Plan(methods, self.rates, tuple(range(self.seeds)), min(TUNING_SEEDS, self.seeds), self.divisions)

    @property
    def learner(self) -> Callable[..., Learner]:
        """Makes the module of a run from a learning rate."""
        return partial(self.module, self.network, self.rounds)

    @property
    def trainer(self) -> Callable[..., L.Trainer]:
        """Makes the Trainer of a run."""
        return partial(
            L.Trainer, max_epochs=self.rounds, accelerator="cpu", logger=False, num_sanity_val_steps=0,
            check_val_every_n_epoch=max(1, self.rounds // CURVE), callbacks=list(self.callbacks),
        )  # fmt: skip


def _fashion(name: str, title: str, partition: fl.data.Partition, tests: int, telling: str) -> Suite:
    federate = partial(_images, FASHION, partition, tests)
    methods = partial(all_methods, 10, 10)
    return Suite(name, f"Fashion-MNIST, {title}", 100, Learner, networks.fashion, federate, methods, telling)


def _modules(name: str, title: str, telling: str, rates: tuple[float, ...] = RATES) -> Suite:
    module, methods = partial(Learner, num_classes=CHARACTERS), partial(telling_methods, CHARACTERS, 10)
    title = f"Python's standard library, modules{title}"
    return Suite(name, title, 100, module, networks.characters, data.modules, methods, f"{_TEXT}; {telling}", rates)


def _images(source: Source, partition: fl.data.Partition, tests: int, root: Path) -> fl.FederatedDataModule:
    return data.images(source, partition, root, tests)


def _people(attributes: tuple[Attribute, ...], root: Path) -> fl.FederatedDataModule:
    return data.people(root, attributes)


def _domains(
    names: tuple[str, ...], each: int, share: float, side: int, batch_size: int, root: Path
) -> fl.FederatedDataModule:
    return data.domains(names, each, share, side, root, batch_size)


def _for_people(rounds: int) -> Strategies:
    return {**all_methods(2, 1.0), **with_groups(rounds)}


def _for_crossings(rounds: int) -> Strategies:
    return {REFERENCE: all_methods(2, 1.0)[REFERENCE], **with_groups(rounds, 4)}


_FASHION = "100 clients, 10 per round, MLP 784-200-200-10, batches of 50, one local epoch"
_PEOPLE = "10 age groups, all of them in every round, one hidden layer of 64, batches of 256, one local epoch"
_TEXT = (
    f"58 modules and packages, 10 per round; the next character after {CONTEXT}, one hidden layer of 256, batches of "
    "50, one local epoch"
)
SUITES: tuple[Suite, ...] = (
    _fashion("fmnist-pat2", "two classes per client (Pat-2)", Pathological(100, 2), 0, _FASHION),
    Suite(
        "adult",
        "Adult, age groups",
        100,
        PeopleLearner,
        networks.people,
        partial(_people, ("sex",)),
        partial(_for_people, 100),
        f"{_PEOPLE}; the groups of people are men and women",
    ),
    Suite(
        "adult-crossings",
        "Adult, age groups, race by sex",
        50,
        partial(PeopleLearner, num_groups=4),
        partial(networks.people, 92),
        partial(_people, ("race", "sex")),
        partial(_for_crossings, 50),
        f"{_PEOPLE}; the four groups of people are men and women who are white, and who are not. The smallest group of "
        "a client has 60 people to train and validate with, and 23 to test: women of 60 and more who are not white. "
        "Groups without people would be left out; small ones count in full, so chance alone makes the gap within a "
        "client larger than that of all people together. With the five races of the data, three clients would have "
        "fewer than 10 people of a race. FA and FairFed refuse more than two groups",
        FEWER_RATES,
        clients_of="adult",
    ),
    _fashion(
        "fmnist-dir",
        "shares of classes from Dirichlet(0.1)",
        Dirichlet(100, 0.1, min_size=20),
        100,
        f"{_FASHION}; every client tests on 100 images in proportion to its classes",
    ),
    _fashion("fmnist-pat1", "one class per client (Pat-1)", Pathological(100, 1), 0, _FASHION),
    Suite(
        "office",
        "Office-Caltech, domains",
        40,
        Learner,
        networks.resnet,
        partial(_domains, OFFICE, 1, 1.0, 32, 32),
        partial(for_domains, 10),
        "4 domains, all of them in every round, ResNet-10 of width 16, 32 x 32 pixels, batches of 32, one local epoch",
    ),
    Suite(
        "digits",
        "MNIST and USPS, domains",
        40,
        Learner,
        networks.resnet,
        partial(_domains, ("mnist", "usps"), 5, 0.01, 16, 32),
        partial(for_domains, 10),
        "5 clients of each domain with a hundredth of its training images each, all of them in every round, ResNet-10 "
        "of width 16, 16 x 16 pixels, batches of 32, one local epoch",
    ),
    Suite(
        "cifar-pat2",
        "CIFAR-10, two classes per client (Pat-2)",
        100,
        Learner,
        networks.cifar,
        partial(_images, CIFAR10, Pathological(100, 2), 0),
        partial(telling_methods, 10, 10, FAIR_ROW),
        "100 clients, 10 per round, CNN with two convolutions of 32 channels, batches of 50, one local epoch",
    ),
    _modules("text", "", "what is tested is the last fifth of a module"),
    Suite(
        "fmnist-server",
        "Fashion-MNIST, two classes per client (Pat-2), other steps of the server",
        100,
        Learner,
        networks.fashion,
        partial(_images, FASHION, Pathological(100, 2), 0),
        partial(server_steps, 10),
        f"{_FASHION}; the server takes so many times a method's step, or follows it with momentum",
        clients_of="fmnist-pat2",
    ),
    Suite(
        "fmnist-fedfv",
        "Fashion-MNIST, one class per client (Pat-1), arguments of FedFV",
        100,
        Learner,
        networks.fashion,
        partial(_images, FASHION, Pathological(100, 1), 0),
        partial(arguments_of_fedfv, 10),
        _FASHION,
        clients_of="fmnist-pat1",
    ),
    Suite(
        "adult-rates",
        "Adult, age groups, larger learning rates",
        100,
        PeopleLearner,
        networks.people,
        partial(_people, ("sex",)),
        partial(telling_methods, 2, 1.0),
        f"{_PEOPLE}; learning rates 1, 3 and 10",
        LARGE_RATES,
        clients_of="adult",
    ),
    Suite(
        "adapters",
        "Adapters of a language model, owners with different tasks",
        20,
        AdapterLearner,
        adapted,
        adapter_tasks.owners,
        for_adapters,
        "20 modules of Python's standard library with one of four tasks each, 10 per round; LoRA of rank 4 in a "
        "transformer with two blocks of width 48; 60 to 240 windows of 32 characters to train with, batches of 20, one "
        "local epoch; three divisions draw modules",
        FEWER_RATES,
        seeds=1,
        divisions=3,
        bounds="local",
        callbacks=(ConflictCount(),),
    ),
    replace(
        _modules("text-rates", ", larger learning rates", "learning rates 1, 3 and 10", LARGE_RATES), clients_of="text"
    ),
)


def suite(name: str) -> Suite:
    """The suite of this name."""
    return next(each for each in SUITES if each.name == name)
