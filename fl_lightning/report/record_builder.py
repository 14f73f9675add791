# SPDX-License-Identifier: Apache-2.0
"""Gathers a fit's rounds and evaluations into a record whose size is bounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from math import isfinite
from typing import Any, Literal

from fl_lightning.core.records import EvaluationRecord, RoundRecord
from fl_lightning.core.storage.rule_state import matched
from fl_lightning.metrics.functional import Mode
from fl_lightning.report.record import Absence, ClientValues, FitRecord, MetricSeries, RoundSeries, finite

_VALUES = 200_000  # numbers of single clients in the kept evaluations
_REASONS, _NAMED = 40, 20
_REST = "other reasons"
_Entry = tuple[int, Mapping[str, float | None]]
"""The rounds finished at an evaluation, and what sums it up."""


class RecordBuilder:
    """Grows with every round and evaluation; a number for a round costs some bytes, clients' values are thinned out.

    Of the evaluations, every second, fourth and so on keeps its clients' values, so that at most 200,000 numbers are
    kept, and always the first and the last one.
    """

    def __init__(self, record: FitRecord) -> None:
        self._base = record
        self._rounds: dict[str, list[Any]] = {f.name: list(getattr(record.rounds, f.name)) for f in fields(RoundSeries)}
        self._metrics = {(series.stage, series.metric): _entries(series) for series in record.metrics}
        self._modes = {(series.stage, series.metric): series.mode for series in record.metrics}
        self._evaluations: list[ClientValues | EvaluationRecord] = list(record.evaluations)
        self._absences = {entry.reason: entry for entry in record.absences}

    @property
    def rounds(self) -> int:
        """How many there are."""
        return len(self._rounds["round"])

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

    def cut(self, index: int) -> None:
        """Forgets the rounds from ``index`` on, which an interrupted run left, and the evaluations after them."""
        count = sum(number < index for number in self._rounds["round"])  # rounds ascend
        for values in self._rounds.values():
            del values[count:]
        for key, series in self._metrics.items():
            self._metrics[key] = [entry for entry in series if entry[0] <= index]
        self._evaluations = [values for values in self._evaluations if values.round <= index]

    def add_round(self, record: RoundRecord) -> None:
        """Adds a finished round, in the place of itself and of those after it."""
        if self._rounds["round"] and self._rounds["round"][-1] >= record.round:
            self.cut(record.round)
        entry: dict[str, Any] = {
            "round": record.round,
            "clients": len(record.client_ids),
            "train_loss": finite(record.train_loss),
            "conflicts": None if record.conflicts is None else int(record.conflicts),
            "training_seconds": record.training_seconds,
            "server_seconds": max(0.0, record.seconds - record.training_seconds),
            "evaluation_seconds": 0.0,
        }
        for name, values in self._rounds.items():
            values.append(entry[name])
        self._know(record.client_ids, record.client_names or tuple(map(str, record.client_ids)))
        for client, reason in record.dropped.items():
            self._add_absence(record.round, client, reason)

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

    def _add_absence(self, index: int, client: int, reason: str) -> None:
        reason = reason if reason in self._absences or len(self._absences) < _REASONS else _REST
        found = self._absences.get(reason) or Absence(reason, 0, index, index, ())
        clients = found.client_ids
        if client not in clients and len(clients) < _NAMED:
            clients = (*clients, client)
        self._absences[reason] = replace(found, count=found.count + 1, last_round=index, client_ids=clients)


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
