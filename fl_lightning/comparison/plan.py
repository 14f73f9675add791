# SPDX-License-Identifier: Apache-2.0
"""Which runs a comparison has, and what they are called."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from fl_lightning.arguments import Bounds, checked
from fl_lightning.report.repetitions import Repetition

MOST = 1_000
"""Seeds, divisions and runs at a time: whoever asks for more has mistaken one number for another."""
_LONGEST = 60


@checked(learning_rate=Bounds(above=0), seed=Bounds(0), division=Bounds(0))
@dataclass(frozen=True)
class Run:
    """One fit of a comparison."""

    method: str  # what the table calls the method or the bound
    learning_rate: float | None  # of the clients; None: as the project says
    seed: int  # of the module's first weights and of everything random in the fit
    division: int = 0  # of the data among the clients

    def __str__(self) -> str:
        rate = "" if self.learning_rate is None else f", lr {self.learning_rate:g}"
        division = f", division {self.division}" if self.division else ""
        return f"{self.method}{rate}{division}, seed {self.seed}"

    @property
    def key(self) -> str:
        """Name of the run's file and folder: letters, digits, and signs that every file system takes."""
        rate = "own" if self.learning_rate is None else repr(self.learning_rate)
        division = f"--division-{self.division}" if self.division else ""
        return f"{file_name(self.method)}--lr-{rate}{division}--seed-{self.seed}"


def file_name(method: str) -> str:
    """A method's name in letters, digits, and signs that every file system takes."""
    name = re.sub(r"[^\w.=+-]+", "-", method, flags=re.ASCII)[:_LONGEST]
    return name if name == method else f"{name}-{hashlib.sha256(method.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison.

    With ``tuning_seeds``, learning rates are picked with the first so many seeds on the project's own division, and the
    other repetitions run with the picked one alone; without, each runs with every learning rate.
    """

    methods: tuple[str, ...]  # the first is the reference; bounds come last
    learning_rates: tuple[float | None, ...]  # to choose from; (None,): as the project says
    seeds: tuple[int, ...]
    tuning_seeds: int | None = None
    divisions: int = 1  # each runs with every seed

    def __post_init__(self) -> None:
        for name, values in (("learning_rates", self.learning_rates), ("seeds", self.seeds)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must hold one or more different values, found {list(values)}")
        if self.tuning_seeds is not None and self.tuning_seeds > len(self.seeds):
            raise ValueError(
                f"tuning_seeds must be at most the number of seeds, {len(self.seeds)}, found {self.tuning_seeds}"
            )

    def __len__(self) -> int:
        """All runs, those whose learning rates are not picked yet as well."""
        return len(self.methods) * (len(self.learning_rates) * len(self.picking) + len(self.others))

    @cached_property
    def repetitions(self) -> tuple[Repetition, ...]:
        """With what every method is repeated, a division after the other."""
        return tuple(Repetition(division, seed) for division in range(self.divisions) for seed in self.seeds)

    @cached_property
    def picking(self) -> tuple[Repetition, ...]:
        """Those that learning rates are picked with."""
        return self.repetitions if len(self.learning_rates) == 1 else self.repetitions[: self.tuning_seeds]

    @cached_property
    def others(self) -> tuple[Repetition, ...]:
        """Those that run with the picked learning rate alone."""
        return self.repetitions[len(self.picking) :]

    def grid(self) -> Iterator[Run]:
        """The runs to pick from: a repetition after the other, so that early results have all methods in them."""
        return (
            Run(method, rate, seed, division)
            for division, seed in self.picking
            for method in self.methods
            for rate in self.learning_rates
        )

    def further(self, picked: Mapping[str, float | None]) -> Iterator[Run]:
        """The runs of the other repetitions."""
        return (
            Run(method, picked[method], seed, division)
            for division, seed in self.others
            for method in self.methods
            if method in picked
        )

    def runs(self, picked: Mapping[str, float | None]) -> Iterator[Run]:
        """:meth:`grid`, and then :meth:`further`."""
        return chain(self.grid(), self.further(picked))

    def of_method(self, method: str, rate: float | None) -> dict[Repetition, Run]:
        """A method's runs with one learning rate."""
        return {repetition: Run(method, rate, repetition.seed, repetition.division) for repetition in self.repetitions}


def seed_list(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Seeds as people give them: how many, or which."""
    count = seeds if isinstance(seeds, int) else len(seeds)
    if count > MOST:
        raise ValueError(
            f"seeds must be at most {MOST:,} seeds, found {count:,}: a list, such as [{count}], names them"
        )
    return tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
