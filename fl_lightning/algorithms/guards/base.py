# SPDX-License-Identifier: Apache-2.0
"""The protocol of a guard: a cohort goes in, and out comes who is left out and what becomes of the other rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.algorithms.records import Reads
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage import rule_state
from fl_lightning.core.taken_names import refuse_taken_names
from fl_lightning.core.updates import UpdateMatrix
from fl_lightning.lightning.fit_description import constructor_arguments

Rows = Literal["same", "own"]
"""What a guard with a robust mean of its own makes of the rows.

==========  ============================================================================================================
``"same"``  every row becomes the robust mean, so that a rule whose weights add up to 1 takes it for its step: the paper
``"own"``   rows stay apart, each moved as far as the class says, so that the rule still sees what single clients want
==========  ============================================================================================================
"""

_MANY = 100_000
"""Clients among which a guard's smallest cohort is looked for."""


class CannotGuardError(Exception):
    """Why a guard can make nothing of a cohort, as the end of "the round had"; the round then changes nothing."""


@checked(left_out=Bounds(0), scalars=Bounds(finite=False))
@dataclass(frozen=True)
class Verdict:
    """What a guard makes of a cohort of ``m`` clients with ``n`` columns.

    Row ``i`` becomes ``center + scale_i (row_i - center)``, and each number in it is then moved into its bounds. A row
    with scale 1 keeps its bits.

    Attributes:
        left_out: places of clients whose reports take no part in the round, with the reason.
        scale: ``[m]`` float64 on the CPU; ``None``: 1 for all.
        center: ``[n]``; ``None``: zero.
        bounds: ``[n]`` least and largest value in each column; ``None``: none.
        scalars: numbers worth logging, by name.
    """

    left_out: Mapping[int, str] = field(default_factory=dict)
    scale: Tensor | None = None
    center: Tensor | None = None
    bounds: tuple[Tensor, Tensor] | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)

    def remaining(self, m: int) -> list[int]:
        """The places of those of ``m`` clients that are not left out."""
        return [place for place in range(m) if place not in self.left_out]

    @property
    def changes_rows(self) -> bool:
        """Whether any row becomes another."""
        return self.bounds is not None or (self.scale is not None and bool((self.scale != 1).any()))

    @torch.no_grad()
    def change(self, rows: Tensor, places: list[int]) -> None:
        """Changes rows in place.

        Args:
            rows: ``[k, n]`` those of the clients at these places.
            places: ``k`` places in the cohort that was judged.
        """
        scales = [1.0] * len(places) if self.scale is None else self.scale[places].tolist()
        for row, scale in zip(rows, scales, strict=True):
            if scale != 1:
                if self.center is None:
                    row.mul_(scale)
                elif scale == 0:
                    row.copy_(self.center)
                else:  # from the centre, so that a small scale keeps its digits
                    torch.lerp(self.center.to(row), row, scale, out=row)
            if self.bounds is not None:
                torch.clamp(row, *self.bounds, out=row)


class Guard(ABC):
    """A defence that looks at the updates before the method does, whatever the method is.

    Attributes:
        reads: what the server must get to see of the clients' rows, as in :class:`ServerRule`.
        columnwise: as in :class:`ServerRule`: the guard works on any run of the columns.
    """

    reads: Reads = "rows"
    columnwise: bool = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "judge" in vars(cls) and "reads" not in vars(cls):
            cls.reads = "rows"
        rule_state.set_columnwise(cls, "judge")
        refuse_taken_names(cls, Guard)

    @abstractmethod
    def judge(self, cohort: Cohort) -> Verdict:
        """Says what becomes of the rows, which are finite, and does not change them.

        May change what the guard keeps, declared as for a rule; that is taken back if the round does not count.

        Raises:
            CannotGuardError: the cohort is too small, or lacks somebody.
        """

    def needed(self, m: int) -> int:
        """How many usable reports it takes to judge a round that has ``m``."""
        return 1

    def max_remaining(self, m: int) -> int:
        """How many of ``m`` clients it leaves in a round at most."""
        return m

    def check(self, num_clients: int) -> None:
        """Raises ValueError for ids that none of the registered clients has."""

    def guarded(self, cohort: Cohort) -> Cohort:
        """The cohort as a method sees it behind this guard; rows are copies. For use without a Trainer.

        What clients left out have reported is gone.

        Raises:
            CannotGuardError: the cohort is too small, or lacks somebody.
        """
        verdict = self.judge(cohort)
        places = verdict.remaining(len(cohort))
        rows = cohort.updates.rows[places]
        verdict.change(rows, places)
        ask = cohort.losses_at
        return replace(
            cohort,
            updates=UpdateMatrix(rows, cohort.updates.layout, cohort.updates.columns),
            losses=None if cohort.losses is None else cohort.losses[places],
            sizes=cohort.sizes[places],
            client_ids=tuple(cohort.client_ids[place] for place in places),
            extras={name: value[places] for name, value in cohort.extras.items()},
            companions={name: matrix.beside(matrix.rows[places]) for name, matrix in cohort.companions.items()},
            losses_at=None if ask is None else (lambda params: ask(params)[places]),
        )

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in constructor_arguments(self).items())
        return f"{type(self).__name__}({given})"


def check_guards(guards: Sequence[Guard], most: int, who: str) -> None:
    """Refuses guards that can judge no round, and says how many reports it takes."""
    for guard in guards:
        judged = [m for m in range(1, most + 1) if guard.needed(m) <= m]
        if not judged:
            enough = next((m for m in range(most + 1, _MANY) if guard.needed(m) <= m), None)
            takes = "which no number of clients is enough for" if enough is None else f"which takes {enough} of them"
            raise ValueError(
                f"guard must be able to judge rounds with {who}, found {guard!r}, {takes}: sample more clients per "
                "round, or lower the numbers that the guard was given"
            )
        most = max(map(guard.max_remaining, judged))
        who = f"the {most} clients at most whom {guard!r} leaves"


def assumed(dishonest: float, m: int) -> int:
    """How many of ``m`` clients a guard takes for dishonest: a count as it is, a share rounded up."""
    return dishonest if isinstance(dishonest, int) else ceil(round(dishonest * m, 9))


def below_half(dishonest: float | int, guard: Guard) -> float | int:
    """Refuses a share that leaves no honest majority."""
    if isinstance(dishonest, float) and not dishonest < 0.5:
        name = type(guard).__name__
        raise ValueError(f"dishonest of {name} must be a count or a share below .5, found {dishonest}")
    return dishonest


def require_clients(m: int, guard: Guard) -> None:
    """Refuses cohorts that are too small for what a guard promises."""
    if m < guard.needed(m):
        raise CannotGuardError(
            f"{m} usable report{'s' * (m > 1)}, fewer than the {guard.needed(m)} that {guard!r} needs"
        )


def all_the_same(row: Tensor, m: int, **scalars: float) -> Verdict:
    """The verdict that gives all of ``m`` clients this row ``[n]``."""
    return Verdict(scale=torch.zeros(m, dtype=torch.float64), center=row, scalars=scalars)
