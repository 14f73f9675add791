# SPDX-License-Identifier: Apache-2.0
"""Which runs a comparison has, and what they are called."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fl_lightning.arguments import Bounds, checked

_LONGEST = 60


@checked(learning_rate=Bounds(above=0), seed=Bounds(0))
@dataclass(frozen=True)
class Run:
    """One fit of a comparison.

    Attributes:
        method: what the table calls the method or the bound.
        learning_rate: of the clients; ``None``: as the project says.
        seed: of the module's first weights and of everything random in the fit.
    """

    method: str
    learning_rate: float | None
    seed: int

    def __str__(self) -> str:
        rate = "" if self.learning_rate is None else f", lr {self.learning_rate:g}"
        return f"{self.method}{rate}, seed {self.seed}"

    @property
    def key(self) -> str:
        """Name of the run's file and folder: letters, digits, and signs that every file system takes."""
        method = re.sub(r"[^\w.=+-]+", "-", self.method, flags=re.ASCII)[:_LONGEST]
        if method != self.method:
            method += f"-{hashlib.sha256(self.method.encode()).hexdigest()[:8]}"
        rate = "own" if self.learning_rate is None else repr(self.learning_rate)
        return f"{method}--lr-{rate}--seed-{self.seed}"


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison.

    Attributes:
        methods: the methods, the first of which is the reference, and then the bounds.
        learning_rates: to choose from; ``(None,)``: as the project says.
        seeds: of the runs.
    """

    methods: tuple[str, ...]
    learning_rates: tuple[float | None, ...]
    seeds: tuple[int, ...]

    def __iter__(self) -> Iterator[Run]:
        """A seed after the other, so that early results have all methods in them."""
        return (
            Run(method, rate, seed) for seed in self.seeds for method in self.methods for rate in self.learning_rates
        )

    def __len__(self) -> int:
        return len(self.methods) * len(self.learning_rates) * len(self.seeds)

    @property
    def reference(self) -> str:
        """The method that others are compared with."""
        return self.methods[0]


def distinct(name: str, values: Sequence[float]) -> None:
    """Refuses a list in which a value stands twice, or none at all.

    Raises:
        ValueError: it does.
    """
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} must hold one or more different values, found {list(values)}")
