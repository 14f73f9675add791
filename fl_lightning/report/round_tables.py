# SPDX-License-Identifier: Apache-2.0
"""A table of rows by rounds that stays small however many rounds there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fl_lightning.report.record import RoundTable

_CELLS = 50_000
_COLUMNS = 400


class RoundTables:
    """Adds up numbers per row and stretch of rounds.

    A stretch is one round at first. Where the table would have more than 400 columns or 50,000 cells, stretches become
    twice as long, and neighbours are added up.
    """

    def __init__(self, rows: Sequence[str]) -> None:
        self._rows = tuple(rows)
        self._width = 1
        self._sums = np.zeros((2, len(self._rows), 0))  # totals, counts

    @classmethod
    def of(cls, table: RoundTable) -> RoundTables:
        """Goes on with a table."""
        made = cls(table.rows)
        made._width = table.width
        made._sums = np.array([table.totals, table.counts], dtype=np.float64).reshape(2, len(table.rows), -1)
        return made

    @property
    def rows(self) -> tuple[str, ...]:
        """What the rows are called."""
        return self._rows

    def grow(self, rows: Sequence[str]) -> None:
        """More rows, below those that there are."""
        self._sums = np.pad(self._sums, ((0, 0), (0, len(rows) - len(self._rows)), (0, 0)))
        self._rows = tuple(rows)

    def add(self, index: int, numbers: Mapping[int, tuple[float, int]]) -> None:
        """Adds the numbers of a round."""
        most = max(2, min(_COLUMNS, _CELLS // max(1, len(self._rows))))
        while index // self._width >= most:
            self._sums = _padded(self._sums, self._sums.shape[2] + self._sums.shape[2] % 2)
            self._sums = self._sums[:, :, 0::2] + self._sums[:, :, 1::2]
            self._width *= 2
        column = index // self._width
        self._sums = _padded(self._sums, max(column + 1, self._sums.shape[2]))
        if numbers:
            self._sums[:, list(numbers), column] += np.array(list(numbers.values())).T

    def cut(self, first: int) -> None:
        """Forgets the rounds from ``first`` on, with the rounds before it in the same stretch."""
        self._sums = self._sums[:, :, : first // self._width]

    def table(self) -> RoundTable:
        """What has been added up."""
        totals, counts = self._sums[0].tolist(), self._sums[1].astype(np.int64).tolist()
        return RoundTable(self._rows, self._width, tuple(map(tuple, totals)), tuple(map(tuple, counts)))


def _padded(sums: np.ndarray[tuple[int, int, int], np.dtype[np.float64]], columns: int) -> np.ndarray[
    tuple[int, int, int], np.dtype[np.float64]
]:  # fmt: skip
    return np.pad(sums, ((0, 0), (0, 0), (0, columns - sums.shape[2])))
