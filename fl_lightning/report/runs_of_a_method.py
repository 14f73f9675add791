# SPDX-License-Identifier: Apache-2.0
"""Fits by method: those that differ only by their seed are looked at together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fl_lightning.metrics.functional import Mode
from fl_lightning.report.number_formats import Spread, client_label, plural
from fl_lightning.report.record import ClientValues, FitRecord, MetricSeries
from fl_lightning.report.repetitions import Repetition

Stage = Literal["val", "test"]
PERSONAL = "personal/"
"""Begins the names of metrics of the clients' own models."""


@dataclass(frozen=True)
class ClientPoint:
    """One client's value.

    Attributes:
        client_id: the client.
        name: what people call it.
        size: evaluation samples.
        trained: training samples.
        value: of the metric, a mean over the seeds.
        shared: all seeds have this client.
    """

    client_id: int
    name: str
    size: int
    trained: int
    value: float
    shared: bool = True

    @property
    def label(self) -> str:
        """How one speaks of it."""
        return client_label(self.name, self.client_id)


@dataclass(frozen=True)
class Method:
    """The fits of one method.

    Attributes:
        label: what the page calls it.
        records: one per seed.
    """

    label: str
    records: tuple[FitRecord, ...]

    @property
    def repeated(self) -> str:
        """How often it ran, in words."""
        return plural(len(self.records), "run" if any(record.division for record in self.records) else "seed")

    @property
    def is_bound(self) -> bool:
        """It is no method, but bounds what methods can reach."""
        return any(record.is_bound for record in self.records)

    def own(self, metric: str, stage: Stage) -> str:
        """The name under which the values of a metric count: that of the clients' own models, where they have any."""
        known = metrics_of(self.records, stage)
        return f"{PERSONAL}{metric}" if f"{PERSONAL}{metric}" in known else metric

    def ends_infinite(self, metric: str, stage: Stage) -> bool:
        """Whether a client's last value is infinite in one of the fits."""
        pairs = ((record, record.last_values(stage)) for record in self.records)
        return any(count_infinite(r, v, metric) > 0 for r, v in pairs if v is not None and metric in v.values)

    def points(self, metric: str, stage: Stage) -> list[ClientPoint]:
        """Every client's last value, the worst first.

        Where seeds share their clients, a client's values are averaged; otherwise each seed's clients stand for
        themselves. Clients without a value are left out.
        """
        pairs = [(record, record.last_values(stage)) for record in self.records]
        found = [(record, values) for record, values in pairs if values is not None and metric in values.values]
        if not found:
            return []
        same = len({(record.client_names, values.client_ids, values.sizes) for record, values in found}) == 1
        points = []
        for record, values in found[:1] if same else found:
            columns = zip(*(v.values[metric] for _, v in found), strict=True) if same else zip(values.values[metric])
            for client, size, column in zip(values.client_ids, values.sizes, columns, strict=True):
                spread = Spread.of(column)
                name = record.client_names[client] if same else f"{record.client_names[client]} ({told(record)})"
                if spread is not None:
                    points.append(ClientPoint(client, name, size, record.client_sizes[client], spread.mean, same))
        mode = found[0][1].modes[metric]
        return sorted(points, key=lambda point: goodness(point.value, mode))

    def summary(self, metric: str, stage: Stage, key: str) -> dict[Repetition, float]:
        """The last value of one summary number, by repetition."""
        series = {repetition: self.series(record, metric, stage) for repetition, record in self._repeated}
        last = {k: s.summaries[key][-1] for k, s in series.items() if s is not None and s.rounds and key in s.summaries}
        return {repetition: value for repetition, value in last.items() if value is not None}

    @property
    def _repeated(self) -> list[tuple[Repetition, FitRecord]]:
        """The records by their divisions and seeds, or by their places where seeds are not known."""
        found = [Repetition(record.division, record.seed) for record in self.records if record.seed is not None]
        if len(set(found)) < len(self.records):
            found = [Repetition(0, place) for place in range(len(self.records))]
        return list(zip(found, self.records, strict=True))

    @staticmethod
    def series(record: FitRecord, metric: str, stage: Stage) -> MetricSeries | None:
        """A metric of one fit over its evaluations."""
        return next((s for s in record.metrics if (s.metric, s.stage) == (metric, stage)), None)

    def worst(self, metric: str, stage: Stage) -> dict[Repetition, float]:
        """By repetition, the value of the client that is worst off over the seeds (the first of :meth:`points`).

        Where seeds have clients of their own, the value of each seed's worst client.
        """
        points, found = self.points(metric, stage), dict[Repetition, float]()
        for repetition, record in self._repeated:
            values = record.last_values(stage)
            if values is None or metric not in values.values:
                continue
            mode, pairs = values.modes[metric], zip(values.client_ids, values.values[metric], strict=True)
            numbers = {client: value for client, value in pairs if value is not None}
            worst = points[0].client_id if points and points[0].shared else None
            if worst is None and numbers:
                worst = min(numbers, key=lambda client: goodness(numbers[client], mode))
            if worst in numbers:
                found[repetition] = numbers[worst]
        return found

    @property
    def conflicts(self) -> float | None:
        """Share of a round's clients in conflict with the step; bounds have none."""
        clients = sum(sum(record.rounds.clients) for record in self.records)
        if self.is_bound or not clients:
            return None
        return sum(sum(record.rounds.conflicts) for record in self.records) / clients

    @property
    def seconds(self) -> Spread | None:
        """Seconds of training, server and evaluation."""
        return Spread.of([sum(seconds_of(record).values()) for record in self.records if len(record.rounds)])


def told(record: FitRecord) -> str:
    """Which repetition a fit is, in words."""
    return f"division {record.division}, seed {record.seed}" if record.division else f"seed {record.seed}"


def by_method(records: Sequence[FitRecord]) -> list[Method]:
    """Groups fits by method, and by learning rate where a method has several; in the order in which they come."""
    rates: dict[str, set[float | None]] = {}
    for record in records:
        rates.setdefault(record.method, set()).add(record.learning_rate)
    groups: dict[str, list[FitRecord]] = {}
    for record in records:
        several = len(rates[record.method]) > 1
        rate = "no single learning rate" if record.learning_rate is None else f"lr {record.learning_rate:g}"
        groups.setdefault(f"{record.method}, {rate}" if several else record.method, []).append(record)
    return [Method(label, tuple(found)) for label, found in groups.items()]


def shown_stage(records: Sequence[FitRecord]) -> Stage:
    """The stage whose clients' values are compared: the test, if all fits have one."""
    return "test" if all(record.last_values("test") is not None for record in records) else "val"


def metrics_of(records: Sequence[FitRecord], stage: Stage) -> dict[str, Mode]:
    """The metrics of a stage, those where larger is better first, and the clients' own models last."""
    found: dict[str, Mode] = {}
    for record in records:
        found |= {series.metric: series.mode for series in record.metrics if series.stage == stage and series.rounds}
    order = ("max", "abs", "min")
    return dict(sorted(found.items(), key=lambda item: (item[0].startswith(PERSONAL), order.index(item[1]))))


def goodness(value: float, mode: Mode) -> float:
    """The larger, the better."""
    return value if mode == "max" else -(abs(value) if mode == "abs" else value)


def seconds_of(record: FitRecord) -> dict[str, float]:
    """Where a fit's time went."""
    rounds = record.rounds
    parts = {
        "clients' training": sum(rounds.training_seconds),
        "server": sum(rounds.server_seconds),
        "evaluation": sum(rounds.evaluation_seconds),
    }
    return {**parts, "this report": record.recording_seconds} if record.recording_seconds else parts


def worst_first(record: FitRecord) -> list[int]:
    """Client ids in the order of all pictures of a fit: by the last value of the first metric, the worst on top."""
    values, known = record.last_values(), range(len(record.client_names))
    if values is None:
        return list(known)
    metrics = metrics_of([record], values.stage)
    metric = next((name for name in metrics if name in values.values), None)
    if metric is None:
        return list(known)
    numbers = zip(values.client_ids, values.values[metric], strict=True)
    ranked = {client: goodness(number, metrics[metric]) for client, number in numbers if number is not None}
    order = sorted(ranked, key=lambda client: ranked[client])
    return [*order, *(client for client in known if client not in ranked)]


def count_infinite(record: FitRecord, values: ClientValues, metric: str) -> int:
    """How many clients have an infinite value in an evaluation.

    A record has no number for them, as for those without a value, but its summary counts them as clients with one.
    """
    for series in record.metrics:
        if (series.stage, series.metric) == (values.stage, metric) and values.round in series.rounds:
            clients = series.summaries.get("clients", ())[series.rounds.index(values.round) :]
            return int(clients[0] or 0) - sum(v is not None for v in values.values[metric]) if clients else 0
    return 0


def first_values(record: FitRecord, stage: Stage) -> ClientValues | None:
    """The clients' values in the first evaluation of a stage."""
    return next((values for values in record.evaluations if values.stage == stage), None)


def called(record: FitRecord, client: int) -> str:
    """How one speaks of a client."""
    known = client < len(record.client_names)
    return client_label(record.client_names[client] if known else str(client), client)
