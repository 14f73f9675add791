# SPDX-License-Identifier: Apache-2.0
"""Gathers a fit's rounds and evaluations into a record whose size is bounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from math import isfinite
from typing import Any, Literal

import numpy as np

from fl_lightning.core.records import EvaluationRecord, RoundRecord
from fl_lightning.core.storage.rule_state import matched
from fl_lightning.metrics.functional import Mode
from fl_lightning.report.record import Absence, ClientValues, FitRecord, MetricSeries, RoundSeries, RoundTable, finite

_VALUES = 200_000  # numbers of single clients in the kept evaluations
_CLIENTS = 20_000  # of more clients, weights are not kept
_REASONS, _NAMED = 40, 20
_REST = "other reasons"
DROP_OUT = "dropped out"
"""What a round says of clients that the sampler let drop out."""
_Entry = tuple[int, Mapping[str, float | None]]
"""The rounds finished at an evaluation, and what sums it up."""


class RecordBuilder:
    """Grows with every round and evaluation; a number for a round costs some bytes, clients' values are thinned out.

    Of the evaluations, every second, fourth and so on keeps its clients' values, so that at most 200,000 numbers are
    kept, and always the first and the last one. Weights and conflicts per layer become means over longer stretches.
    """

    def __init__(self, record: FitRecord) -> None:
        self._base = record
        self._rounds: dict[str, list[Any]] = {f.name: list(getattr(record.rounds, f.name)) for f in fields(RoundSeries)}
        self._metrics = {(series.stage, series.metric): _entries(series) for series in record.metrics}
        self._modes = {(series.stage, series.metric): series.mode for series in record.metrics}
        self._evaluations: list[ClientValues | EvaluationRecord] = list(record.evaluations)
        self._absences = {(entry.drop_out, entry.reason): entry for entry in record.absences}
        self._weights = None if record.weights is None else RoundTables.of(record.weights)
        self._layers = None if record.layer_conflicts is None else RoundTables.of(record.layer_conflicts)

    def add_setting(self, name: str, value: float) -> None:
        """Sets what is known only as the fit goes on."""
        self._base = replace(self._base, settings={**self._base.settings, name: finite(value)})

    def record(self, **entries: Any) -> FitRecord:
        """What was gathered so far."""
        self._base = replace(self._base, **entries)
        self._evaluations = [e if isinstance(e, ClientValues) else ClientValues.of(e) for e in self._evaluations]
        return replace(
            self._base,
            rounds=RoundSeries(**{name: tuple(values) for name, values in self._rounds.items()}),
            metrics=tuple(_series(*key, self._modes[key], found) for key, found in self._metrics.items()),
            evaluations=tuple(self._evaluations),  # type: ignore[arg-type]
            weights=None if self._weights is None else self._weights.table(),
            layer_conflicts=None if self._layers is None else self._layers.table(),
            absences=tuple(self._absences.values()),
        )

    def go_on(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """The fit goes on with these clients, told by their names; those that are gone follow them."""
        before = self.record()
        ids, gone = matched(before.client_names, names)
        where = [ids[client] for client in range(len(ids))]
        left = [size for size, place in zip(before.client_sizes, where, strict=True) if place >= len(names)]
        names = (*names, *gone)
        self._base = replace(self._base, client_names=names, client_sizes=(*sizes, *left))
        self._evaluations = [_with_ids(values, where) for values in before.evaluations]
        for key, found in self._absences.items():
            self._absences[key] = replace(found, client_ids=tuple(where[client] for client in found.client_ids))
        if self._weights is not None:
            self._weights.grow(names, where)

    def cut(self, index: int) -> None:
        """Forgets the rounds from ``index`` on, which an interrupted run left, and the evaluations after them."""
        count = sum(number < index for number in self._rounds["round"])  # rounds ascend
        for values in self._rounds.values():
            del values[count:]
        for key, series in self._metrics.items():
            self._metrics[key] = [entry for entry in series if entry[0] <= index]
        self._evaluations = [values for values in self._evaluations if values.round <= index]
        for tables in (self._weights, self._layers):
            if tables is not None:
                tables.cut(index)

    def add_round(self, record: RoundRecord, learning_rate: float | None) -> bool:
        """Adds a finished round, in the place of itself and of those after it; returns whether it is the first."""
        if self._rounds["round"] and self._rounds["round"][-1] >= record.round:
            self.cut(record.round)
        drop_outs = sum(reason == DROP_OUT for reason in record.dropped.values())
        entry: dict[str, Any] = {
            "round": record.round,
            "clients": len(record.client_ids),
            "train_loss": finite(record.train_loss),
            "step_norm": finite(record.step_norm),
            "conflicts": None if record.conflicts is None else int(record.conflicts),
            "drop_outs": drop_outs,
            "errors": len(record.dropped) - drop_outs,
            "flagged": bool(record.flagged),
            "skipped": record.skipped is not None,
            "learning_rate": None if learning_rate is None else finite(learning_rate),
            "training_seconds": record.training_seconds,
            "server_seconds": max(0.0, record.seconds - record.training_seconds),
            "evaluation_seconds": 0.0,
        }
        for name, values in self._rounds.items():
            values.append(entry[name])
        self._know(record.client_ids, record.client_names or tuple(map(str, record.client_ids)))
        self._add_tables(record)
        for client, reason in record.dropped.items():
            self._add_absence(record.round, client, reason)
        return len(self._rounds["round"]) == 1

    def add_evaluation_seconds(self, seconds: float) -> None:
        """The validation after the last round took so long."""
        if self._rounds["evaluation_seconds"]:
            self._rounds["evaluation_seconds"][-1] += seconds

    def add_evaluation(self, record: EvaluationRecord) -> None:
        """Adds an evaluation; those of the same stage and of the same or later rounds are replaced."""
        stage: Literal["val", "test"] = "val" if record.stage == "val" else "test"
        self._know(record.client_ids, record.client_names)
        for name in record.values:
            key, mode = (stage, name), record.mode(name)
            summary = {each: finite(float(number)) for each, number in record.summary(name).items()}
            summary["undefined"] = float(len(record.undefined.get(name, ())))
            if self._modes.setdefault(key, mode) != mode:
                self._modes[key], self._metrics[key] = mode, []
            series = self._metrics.setdefault(key, [])
            while series and series[-1][0] >= record.round:
                series.pop()
            series.append((record.round, summary))
        others = [v for v in self._evaluations if v.stage != stage]
        own = [v for v in self._evaluations if v.stage == stage and v.round < record.round]
        self._evaluations = [*others, *self._thinned([*own, record])]

    def _thinned(self, own: list[ClientValues | EvaluationRecord]) -> list[ClientValues | EvaluationRecord]:
        """At most so many evaluations that their numbers fit, at even distances, the first and the last among them."""
        last = own[-1]
        numbers = {number for (stage, _), found in self._metrics.items() if stage == last.stage for number, _ in found}
        place = {number: k for k, number in enumerate(sorted(numbers))}
        cost, stride = len(last.client_ids) * (len(last.values) + 2), 1
        while (len(place) // stride + 2) * cost > _VALUES and stride < len(place):
            stride *= 2
        return [values for values in own if place.get(values.round, 0) % stride == 0 or values is last]

    def _know(self, client_ids: Sequence[int], names: Sequence[str]) -> None:
        """Clients may appear that nobody named before: some take part in evaluations only."""
        known = len(self._base.client_names)
        beyond = {client: name for client, name in zip(client_ids, names, strict=True) if client >= known}
        if beyond:
            count = max(beyond) + 1
            more = tuple(beyond.get(client, str(client)) for client in range(known, count))
            sizes = (*self._base.client_sizes, *(0 for _ in more))
            self._base = replace(self._base, client_names=(*self._base.client_names, *more), client_sizes=sizes)

    def _add_tables(self, record: RoundRecord) -> None:
        clients, names = len(record.client_ids), self._base.client_names
        if record.layer_conflicts:
            if self._layers is None or self._layers.rows != tuple(record.layer_conflicts):
                self._layers = RoundTables(tuple(record.layer_conflicts))
            counts = enumerate(record.layer_conflicts.values())
            self._layers.add(record.round, {row: (float(count), clients) for row, count in counts})
        if record.weights is not None and len(names) <= _CLIENTS:
            if self._weights is None:
                self._weights = RoundTables(names)
            if len(self._weights.rows) < len(names):
                self._weights.grow(names, range(len(self._weights.rows)))
            weights = zip(record.client_ids, record.weights.tolist(), strict=True)
            self._weights.add(record.round, {client: (float(weight), 1) for client, weight in weights})

    def _add_absence(self, index: int, client: int, reason: str) -> None:
        out = reason == DROP_OUT
        key = (out, reason) if (out, reason) in self._absences or len(self._absences) < _REASONS else (False, _REST)
        found = self._absences.get(key) or Absence(key[1], key[0], 0, index, index, ())
        clients = found.client_ids
        if client not in clients and len(clients) < _NAMED:
            clients = (*clients, client)
        self._absences[key] = replace(found, count=found.count + 1, last_round=index, client_ids=clients)


def _with_ids(values: ClientValues, ids: Sequence[int]) -> ClientValues:
    """The same values of clients that have other ids now."""
    order = sorted(range(len(values.client_ids)), key=lambda place: ids[values.client_ids[place]])
    found = {name: tuple(column[place] for place in order) for name, column in values.values.items()}
    clients = tuple(ids[values.client_ids[place]] for place in order)
    sizes = tuple(values.sizes[place] for place in order)
    one_class = {name: tuple(sorted(ids[client] for client in some)) for name, some in values.one_class.items()}
    return replace(values, client_ids=clients, sizes=sizes, values=found, one_class=one_class)


def _entries(series: MetricSeries) -> list[_Entry]:
    columns = series.summaries.items()
    return [(number, {key: values[k] for key, values in columns}) for k, number in enumerate(series.rounds)]


def _series(stage: Literal["val", "test"], name: str, mode: Mode, found: list[_Entry]) -> MetricSeries:
    keys = dict.fromkeys(key for _, summary in found for key in summary)
    summaries = {key: tuple(summary.get(key) for _, summary in found) for key in keys}
    return MetricSeries(name, stage, mode, tuple(number for number, _ in found), summaries)


def plain_json(value: Any) -> Any:
    """Plain values without NaN and infinity, which JSON does not know: they become text."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: plain_json(entry) for name, entry in value.items()}
    return [plain_json(entry) for entry in value] if isinstance(value, (list, tuple)) else value


_CELLS = 50_000
_COLUMNS = 400
_Sums = np.ndarray[tuple[int, int, int], np.dtype[np.float64]]


class RoundTables:
    """Adds up numbers per row and stretch of rounds.

    A stretch is one round at first. Where the table would have more than 400 columns or 50,000 cells, stretches become
    twice as long, and neighbours are added up.
    """

    def __init__(self, rows: Sequence[str]) -> None:
        self.rows, self._width = tuple(rows), 1
        self._sums: _Sums = np.zeros((2, len(self.rows), 0))  # totals, counts

    @classmethod
    def of(cls, table: RoundTable) -> RoundTables:
        """Goes on with a table."""
        made = cls(table.rows)
        made._width = table.width
        made._sums = np.array([table.totals, table.counts], dtype=np.float64).reshape(2, len(table.rows), -1)
        return made

    def grow(self, rows: Sequence[str], places: Sequence[int]) -> None:
        """More rows; those that there are go to these places."""
        before, self._sums = self._sums, np.zeros((2, len(rows), self._sums.shape[2]))
        self._sums[:, list(places)[: len(self.rows)]] = before
        self.rows = tuple(rows)

    def add(self, index: int, numbers: Mapping[int, tuple[float, int]]) -> None:
        """Adds the numbers of a round."""
        most = max(2, min(_COLUMNS, _CELLS // max(1, len(self.rows))))
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
        return RoundTable(self.rows, self._width, tuple(map(tuple, totals)), tuple(map(tuple, counts)))


def _padded(sums: _Sums, columns: int) -> _Sums:
    return np.pad(sums, ((0, 0), (0, 0), (0, columns - sums.shape[2])))
