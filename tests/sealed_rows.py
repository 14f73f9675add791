# SPDX-License-Identifier: Apache-2.0
"""Cohorts whose matrices give a rule what it says that it reads, and refuse everything else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fl_lightning.core.cohort import Cohort
from fl_lightning.core.updates import UpdateMatrix

LEVELS = ("sums", "gram", "rows")
MEMBERS = {
    **dict.fromkeys(
        ("layout", "dtype", "device", "columns", "offsets", "norms", "norm_of", "combine", "beside"), "sums"
    ),
    **dict.fromkeys(("gram", "cross_gram", "dots", "squared_distances"), "gram"),
    "puc_track": "rows",
}
"""What a rule reads by a member of ``UpdateMatrix``; a new member needs a line here."""


class RefusedError(AssertionError):
    """A rule asked for more than it says that it reads."""


class SealedRows:
    """Rows that cannot be read, but for their shape, dtype and device."""

    def __init__(self, rows: torch.Tensor, own: bool) -> None:
        self._rows, self._own = rows, own
        self.shape, self.dtype, self.device, self.is_cpu = rows.shape, rows.dtype, rows.device, rows.is_cpu

    def __iter__(self) -> Iterator[torch.Tensor]:
        """For client halves, which keep a client's own row for this client."""
        if not self._own:
            raise RefusedError("the rule took single rows")
        return iter(self._rows)

    def __getitem__(self, place: Any) -> Any:
        raise RefusedError(f"the rule took the rows {place}")

    def __getattr__(self, name: str) -> Any:
        raise RefusedError(f"the rule read the rows ({name})")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RefusedError(f"the rule read the rows ({function.__name__})")


class SealedMatrix:
    __class__ = UpdateMatrix  # cohorts take nothing else

    """Stands in for an ``UpdateMatrix``."""

    def __init__(self, matrix: Any, reads: str, own: bool = False) -> None:
        self._matrix, self._level, self._own = matrix, LEVELS.index(reads), own

    def __len__(self) -> int:
        return len(self._matrix)

    @property
    def rows(self) -> Any:
        return self._matrix.rows if self._level == 2 else SealedRows(self._matrix.rows, self._own)

    def __getattr__(self, name: str) -> Any:
        if name not in MEMBERS:
            raise AssertionError(f"MEMBERS of sealed_rows.py must say what a rule reads by UpdateMatrix.{name}")
        if LEVELS.index(MEMBERS[name]) > self._level:
            raise RefusedError(f"the rule called {name}")
        return getattr(self._matrix, name)

    def cross_gram(self, others: Any, *more: Any) -> torch.Tensor:
        """Products with sealed rows, too: those of companions."""
        opened = others._rows if isinstance(others, SealedRows) else others
        return self.__getattr__("cross_gram")(opened, *more)


def sealed(cohort: Cohort, reads: str, own: bool = False) -> Cohort:
    """The cohort with matrices, of companions as well, that refuse more than ``reads``."""
    companions = {name: SealedMatrix(matrix, reads, own) for name, matrix in cohort.companions.items()}
    return replace(cohort, updates=SealedMatrix(cohort.updates, reads, own), companions=companions)
