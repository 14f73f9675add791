# SPDX-License-Identifier: Apache-2.0
"""Cohorts whose matrices give a rule what it says that it reads, and refuse everything else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from fl_lightning.algorithms.records import READS, Reads
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.updates import UpdateMatrix

LEVELS = tuple(READS)
MEMBERS: Mapping[str, Reads] = {
    **dict.fromkeys(
        ("layout", "dtype", "device", "columns", "offsets", "norms", "norm_of", "combine", "beside"), "sums"
    ),
    **dict.fromkeys(("gram", "cross_gram", "dots", "squared_distances"), "gram"),
    "puc_track": "rows",
}
"""What a rule reads by a member of ``UpdateMatrix``; a new member needs a line here."""


class RefusedError(AssertionError):
    """A rule asked for more than it says that it reads."""


def sealed(cohort: Cohort, reads: Reads, own: bool = False) -> Cohort:
    """The cohort with matrices, of companions as well, that refuse more than ``reads``.

    With ``own``, single rows may be taken one after the other, as client halves do for what belongs to each client.
    """
    companions: Any = {name: _SealedMatrix(matrix, reads, own) for name, matrix in cohort.companions.items()}
    return replace(cohort, updates=_SealedMatrix(cohort.updates, reads, own), companions=companions)  # type: ignore[arg-type]


class _SealedRows:
    """Rows that cannot be read, but for their shape, dtype and device."""

    def __init__(self, rows: Tensor, own: bool) -> None:
        self.opened, self._own = rows, own
        self.shape, self.dtype, self.device, self.is_cpu = rows.shape, rows.dtype, rows.device, rows.is_cpu

    def __iter__(self) -> Iterator[Tensor]:
        if not self._own:
            raise RefusedError("single rows")
        return iter(self.opened)

    def __getitem__(self, place: Any) -> Any:
        raise RefusedError(f"the rows {place}")

    def __getattr__(self, name: str) -> Any:
        raise RefusedError(f"the rows ({name})")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RefusedError(f"the rows ({function.__name__})")


class _SealedMatrix:
    """Stands in for an ``UpdateMatrix``."""

    __class__ = UpdateMatrix  # type: ignore[assignment]  # cohorts take nothing else

    def __init__(self, matrix: UpdateMatrix, reads: Reads, own: bool) -> None:
        self._matrix, self._level, self._own = matrix, LEVELS.index(reads), own

    def __len__(self) -> int:
        return len(self._matrix)

    @property
    def rows(self) -> Any:
        return self._matrix.rows if self._level == 2 else _SealedRows(self._matrix.rows, self._own)

    def __getattr__(self, name: str) -> Any:
        if name not in MEMBERS:
            raise AssertionError(f"MEMBERS of sealed_rows.py must say what a rule reads by UpdateMatrix.{name}")
        if LEVELS.index(MEMBERS[name]) > self._level:
            raise RefusedError(f"{name}()")
        return getattr(self._matrix, name)

    def cross_gram(self, others: Any, *more: Any) -> Any:
        """Products with sealed rows, too: those of companions."""
        return self.__getattr__("cross_gram")(getattr(others, "opened", others), *more)
