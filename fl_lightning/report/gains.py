# SPDX-License-Identifier: Apache-2.0
"""What every client gains over training alone: whether it should join."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite, nan
from statistics import fmean
from typing import Literal

from fl_lightning.metrics.functional import Mode
from fl_lightning.report.conclusion import LOCAL
from fl_lightning.report.number_formats import interval_words, notation, number
from fl_lightning.report.repetitions import Interval, Repetition, interval
from fl_lightning.report.runs_of_a_method import Method, Stage, goodness, label_of
from fl_lightning.report.tables import Part, Table

Advice = Literal["better off", "worse off", "cannot be told", "not measured"]
ADVICE: tuple[Advice, ...] = ("better off", "worse off", "cannot be told", "not measured")
_OPENED = 15
"""Of so many clients or fewer, the table is open."""


@dataclass(frozen=True)
class Gain:
    """What a client gains by a method over training alone.

    Attributes:
        client: its name.
        alone: mean of its value over the repetitions in which it trains alone; NaN without one.
        together: the same with the method.
        gained: what it gains in each repetition that has both values; positive is good.
    """

    client: str
    alone: float
    together: float
    gained: Mapping[Repetition, float]

    @cached_property
    def interval(self) -> Interval | None:
        """Of the gain, with 95 %; ``None`` where no repetition has both values."""
        return interval(self.gained)

    @property
    def advice(self) -> Advice:
        """What the interval says: ``"cannot be told"`` where it has zero in it, ``"not measured"`` without one."""
        if self.interval is None:
            return "not measured"
        if abs(self.interval.middle) <= self.interval.half:
            return "cannot be told"
        return "better off" if self.interval.middle > 0 else "worse off"


def trained_alone(methods: Iterable[Method]) -> Method | None:
    """The fits in which every client trains alone, if there are any."""
    return next((method for method in methods if method.is_bound and method.first.method == LOCAL), None)


def gains(method: Method, alone: Method, metric: str, stage: Stage, mode: Mode) -> list[Gain]:
    """Each client's gain, the smallest first, and last those of whom nothing is known."""
    with_it, by_itself = (by_client(one, one.own(metric, stage), stage) for one in (method, alone))
    found = []
    for client in {**with_it, **by_itself}:
        ours, theirs = with_it.get(client, {}), by_itself.get(client, {})
        gained = {one: goodness(ours[one], mode) - goodness(theirs[one], mode) for one in ours.keys() & theirs.keys()}
        before, after = (fmean(values.values()) if values else nan for values in (theirs, ours))
        found.append(Gain(client, before, after, gained))
    return sorted(found, key=lambda gain: (inf,) if gain.interval is None else gain.interval)


def by_client(method: Method, metric: str, stage: Stage) -> dict[str, dict[Repetition, float]]:
    """Each client's last values, by its name, over the repetitions in which it has one.

    Clients without any value are there, too. Several divisions of the data may deal samples to clients anew: clients
    that have numbers and no names are then others each time, and nobody is there.
    """
    if not method.same_clients and any(name.isdecimal() for record in method.records for name in record.client_names):
        return {}
    found: dict[str, dict[Repetition, float]] = {}
    for repetition, values in method.ends(metric, stage).items():
        for client, value in values.items():
            known = found.setdefault(label_of(method.fits[repetition], client), {})
            if isfinite(value):
                known[repetition] = value
    return found


def gain_tables(methods: Sequence[Method], metric: str, stage: Stage, mode: Mode) -> dict[str, list[Gain]]:
    """:func:`gains` by the labels of the methods; empty where no client has trained alone."""
    alone = trained_alone(methods)
    if alone is None:
        return {}
    found = {m.label: gains(m, alone, metric, stage, mode) for m in methods if not m.is_bound}
    return {label: each for label, each in found.items() if any(gain.interval for gain in each)}


def counted(found: Sequence[Gain]) -> str:
    """How many clients get which advice, in words."""
    counts = {advice: sum(gain.advice == advice for gain in found) for advice in ADVICE}
    return ", ".join(f"{count:,} {advice}" for advice, count in counts.items() if count)


def joining(found: Mapping[str, Sequence[Gain]], metric: str) -> Part:
    """The section about the gains of :func:`gain_tables`; the first table is open unless it is long."""
    head = ["client", "alone", "with it", "gain", "the client is"]
    parts = [
        Table([gain_cells(gain) for gain in each], "numbers", head, f"{label}: {counted(each)}",
              place == 0 and len(each) <= _OPENED)
        for place, (label, each) in enumerate(found.items())
    ]  # fmt: skip
    caption = (
        f"What each client gains in {metric} over training alone ({LOCAL}), with the 95 % interval over the "
        "repetitions. The client is better or worse off where the interval leaves out zero: by chance, that happens to "
        "one of 20 clients that gain nothing."
    )
    return Part("Should a client join?", parts, caption) if parts else Part()


def gain_cells(gain: Gain) -> tuple[str, str, str, str, str]:
    """A client's row: name, value alone, value with the method, gain with its interval, and advice."""
    form = notation([gain.alone, gain.together])
    alone, together = number(gain.alone, form), number(gain.together, form)
    return gain.client, alone, together, interval_words(gain.interval, form, "+"), gain.advice
