# SPDX-License-Identifier: Apache-2.0
"""Fits by method: those that differ only by their seed or by the division of the data are looked at together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, isnan, nan
from statistics import fmean
from typing import Literal

import torch

from fl_lightning.metrics.functional import Mode, fairness_summary
from fl_lightning.report.number_formats import client_label, plural
from fl_lightning.report.record import ClientValues, FitRecord, MetricSeries
from fl_lightning.report.repetitions import Repetition

Stage = Literal["val", "test"]
PERSONAL = "personal/"
"""Begins the names of metrics of the clients' own models."""
SPENT = ("clients' training", "server", "evaluation")
"""What a fit's time is spent on."""


@dataclass(frozen=True)
class ClientPoint:
    """One client's value of a metric, a mean over the repetitions."""

    client_id: int
    label: str  # how one speaks of it
    size: int  # evaluation samples
    trained: int  # training samples
    value: float  # NaN for a client without one


@dataclass(frozen=True)
class Method:
    """The fits of one method, by what they are repeated with, under the label that a page has for it."""

    label: str
    fits: Mapping[Repetition, FitRecord]

    @property
    def records(self) -> list[FitRecord]:
        """The fits, one after the other."""
        return list(self.fits.values())

    @property
    def first(self) -> FitRecord:
        """The fit that is drawn where one is."""
        return self.records[0]

    @property
    def repeated(self) -> str:
        """How often it ran, in words."""
        return plural(len(self.fits), "run" if any(record.division for record in self.records) else "seed")

    @property
    def is_bound(self) -> bool:
        """It is no method, but bounds what methods can reach."""
        return any(record.is_bound for record in self.records)

    @cached_property
    def same_clients(self) -> bool:
        """All fits are of the same clients, with the same data."""
        return len({(record.division, record.client_names, record.client_sizes) for record in self.records}) == 1

    def own(self, metric: str, stage: Stage) -> str:
        """The name under which the values of a metric count: that of the clients' own models, where they have any."""
        last, name = (record.last_values(stage) for record in self.records), f"{PERSONAL}{metric}"
        return name if any(values is not None and name in values.values for values in last) else metric

    def clients(self, metric: str, stage: Stage) -> list[ClientPoint]:
        """Every client's last value, the worst first, and last those without one, who have NaN.

        Where all fits have the same clients, a client's values are averaged. Otherwise each fit's clients stand for
        themselves.
        """
        pairs = [(record, record.last_values(stage)) for record in self.records]
        found = [(record, values) for record, values in pairs if values is not None and metric in values.values]
        points = []
        for group in [found] if self.same_clients and found else [[pair] for pair in found]:
            record, values = group[0]
            columns = [dict(zip(v.client_ids, v.values[metric], strict=True)) for _, v in group]
            for client, size in zip(values.client_ids, values.sizes, strict=True):
                known = [value for column in columns if (value := column.get(client)) is not None]
                name = label_of(record, client) + f" ({repetition_label(record)})" * (not self.same_clients)
                value = fmean(known) if known else nan
                points.append(ClientPoint(client, name, size, record.client_sizes[client], value))
        return sorted(points, key=lambda one: (isnan(one.value), goodness(one.value, found[0][1].modes[metric])))

    def ends(self, metric: str, stage: Stage) -> dict[Repetition, dict[int, float]]:
        """:func:`at_end` of every fit."""
        return {repetition: at_end(record, metric, stage) for repetition, record in self.fits.items()}

    def worst_client(self, metric: str, stage: Stage, mode: Mode) -> int | None:
        """Who is worst off on average over the fits; ``None`` where nobody has a value, or fits have other clients."""
        return _worst(self.ends(metric, stage).values(), mode) if self.same_clients else None

    def numbers(self, metric: str, stage: Stage, mode: Mode) -> dict[str, dict[Repetition, float]]:
        """By name and repetition, how the values of :func:`at_end` are spread, as far as that is finite.

        The names are those of ``fairness_summary``, and ``worst``: the value of :meth:`worst_client`, or where fits
        have other clients that of the worst one of each. Signed gaps count by their size.
        """
        who, found = self.worst_client(metric, stage, mode), dict[str, dict[Repetition, float]]()
        for repetition, record in self.fits.items():
            values, last = at_end(record, metric, stage), record.last_values(stage)
            if not values or last is None:
                continue
            sized = {client: abs(value) if mode == "abs" else value for client, value in values.items()}
            column, sizes = torch.tensor(list(sized.values()), dtype=torch.float64), torch.tensor(last.sizes)
            summary = {name: float(n) for name, n in fairness_summary(column, sizes, mode == "max").items()}
            one = _worst([values], mode) if who is None else who
            summary["worst"] = nan if one is None else sized.get(one, nan)
            for name, number in summary.items():
                if isfinite(number):
                    found.setdefault(name, {})[repetition] = number
        return found

    @property
    def conflicts(self) -> float:
        """Share of a round's clients in conflict with the step; NaN for bounds, and where nobody counted."""
        rounds = [pair for fit in self.records for pair in zip(fit.rounds.conflicts, fit.rounds.clients, strict=True)]
        known = [(count, clients) for count, clients in rounds if count is not None]
        clients = sum(clients for _, clients in known)
        return nan if self.is_bound or not clients else sum(count for count, _ in known) / clients

    @property
    def seconds(self) -> float:
        """Seconds of a fit: training, server and evaluation of all rounds; NaN without a round."""
        found = [sum(seconds_of(record).values()) for record in self.records if len(record.rounds)]
        return fmean(found) if found else nan


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
    return [Method(label, _repeated(found)) for label, found in groups.items()]


def _repeated(records: list[FitRecord]) -> dict[Repetition, FitRecord]:
    """By divisions and seeds, or by places where seeds are not known."""
    found = {Repetition(record.division, record.seed): record for record in records if record.seed is not None}
    if len(found) == len(records):
        return found
    return {Repetition(0, place): record for place, record in enumerate(records)}


def at_end(record: FitRecord, metric: str, stage: Stage) -> dict[int, float]:
    """Each client's last value by its id, NaN for clients without one.

    Where the value of a client is infinite, all are NaN: the others' alone would flatter such a fit.
    """
    found = record.last_values(stage)
    if found is None or metric not in found.values:
        return {}
    infinite = count_infinite(record, found, metric) > 0
    pairs = zip(found.client_ids, found.values[metric], strict=True)
    return {client: nan if infinite or value is None else value for client, value in pairs}


def _worst(fits: Iterable[Mapping[int, float]], mode: Mode) -> int | None:
    """The client whose mean over the fits is the worst."""
    values: dict[int, list[float]] = {}
    for fit in fits:
        for client, value in fit.items():
            if isfinite(value):
                values.setdefault(client, []).append(goodness(value, mode))
    return min(values, key=lambda client: fmean(values[client]), default=None)


def repetition_label(record: FitRecord) -> str:
    """Which repetition a fit is, in words."""
    return f"division {record.division}, seed {record.seed}" if record.division else f"seed {record.seed}"


def label_of(record: FitRecord, client: int) -> str:
    """How one speaks of a client."""
    return client_label(record.client_names[client] if client < len(record.client_names) else str(client))


def series_of(record: FitRecord, metric: str, stage: Stage) -> MetricSeries | None:
    """A metric of one fit over its evaluations."""
    return next((s for s in record.metrics if (s.metric, s.stage) == (metric, stage)), None)


def records_of(methods: Sequence[Method]) -> list[FitRecord]:
    """The fits of several methods."""
    return [record for method in methods for record in method.records]


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


def shown_metrics(methods: Sequence[Method], stage: Stage) -> list[tuple[str, Mode, list[str]]]:
    """What pictures of a stage show: each metric in words, its mode, and its name in each method's records.

    As in the table, the values of the clients' own models count where they have any.
    """
    metrics, found = metrics_of(records_of(methods), stage), []
    for metric, mode in metrics.items():
        if not (metric.startswith(PERSONAL) and metric.removeprefix(PERSONAL) in metrics):
            names = [method.own(metric, stage) for method in methods]
            found.append((names[0] if len(set(names)) == 1 else metric, mode, names))
    return found


def goodness(value: float, mode: Mode) -> float:
    """The larger, the better."""
    return value if mode == "max" else -(abs(value) if mode == "abs" else value)


def seconds_of(record: FitRecord) -> dict[str, float]:
    """Where a fit's time went."""
    rounds = record.rounds
    columns = (rounds.training_seconds, rounds.server_seconds, rounds.evaluation_seconds)
    return dict(zip(SPENT, map(sum, columns), strict=True))


def worst_first(record: FitRecord) -> list[int]:
    """Client ids in the order of all pictures of a fit: by the last value of the first metric, the worst on top."""
    values, known = record.last_values(), range(len(record.client_names))
    if values is None:
        return list(known)
    method = Method("", {Repetition(0, 0): record})
    metric = next((name for name in metrics_of([record], values.stage) if name in values.values), "")
    ranked = [point.client_id for point in method.clients(method.own(metric, values.stage), values.stage)]
    return [*ranked, *sorted(set(known) - set(ranked))]


def count_infinite(record: FitRecord, values: ClientValues, metric: str) -> int:
    """How many clients have an infinite value in an evaluation.

    A record has no number for them, as for those without a value, but its summary counts them as clients with one.
    """
    series = series_of(record, metric, values.stage)
    if series is None or values.round not in series.rounds or "clients" not in series.summaries:
        return 0
    clients = series.summaries["clients"][series.rounds.index(values.round)]
    return int(clients or 0) - sum(value is not None for value in values.values.get(metric, ()))
