# SPDX-License-Identifier: Apache-2.0
"""Limits that clients' values must keep, and whether they break them by more than chance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from fl_lightning.comparison.plan import Measure
from fl_lightning.metrics.functional import guessed_mode
from fl_lightning.report.gains import by_client, gains
from fl_lightning.report.number_formats import notation, number
from fl_lightning.report.repetitions import Interval, Repetition, interval
from fl_lightning.report.runs_of_a_method import Method, label_of

LIMITS: Mapping[str, str] = {
    "mean": "the mean over the clients",
    "worst_10": "the worst tenth of the clients",
    "client": "every client's value",
    "gap": "every client's gap between groups of people",
    "alone": "every client's loss against training alone",
    "clients": "the number of clients with a value",
    "failed": "the number of runs that failed or were interrupted",
}
"""What can be limited."""
_OF_VALUES = ("mean", "worst_10", "client", "alone")
_LEVEL = 0.95
_Numbers = tuple[str, bool, Mapping[str, Mapping[Repetition, float]]]
"""What is limited, whether from below, and its numbers by whom they belong to."""


@dataclass(frozen=True)
class Finding:
    """One number beside its limit.

    Attributes:
        limit: the limit's name, one of :data:`LIMITS`.
        bound: the limit itself.
        who: the client, or what else is limited.
        what: whose number it is, in words.
        at_least: the number must not be smaller; otherwise it must not be larger.
        interval: of the number over the repetitions. All intervals of one limit hold together in 95 of 100 cases.
            ``None``: there is no number, which breaks the limit.
    """

    limit: str
    bound: float
    who: str
    what: str
    at_least: bool
    interval: Interval | None

    @property
    def broken(self) -> bool:
        """The number lies on the wrong side, by chance or not."""
        return self._room < 0

    @property
    def beyond_chance(self) -> bool:
        """The whole interval lies on the wrong side; a number that one run alone has counts as it is."""
        half = inf if self.interval is None else self.interval.half
        return self._room + (half if half < inf else 0.0) < 0

    @property
    def _room(self) -> float:
        """How far the number is on the right side of the limit."""
        gap = -inf if self.interval is None else self.interval.middle - self.bound
        return gap if self.at_least or self.interval is None else -gap

    @property
    def number(self) -> str:
        """The number and its interval, as people read them."""
        if self.interval is None:
            return "no value"
        middle, half = self.interval
        form = "g" if self.limit in ("clients", "failed") else notation([self.bound, middle])
        words = number(middle, form)
        if 0 < half < inf:
            words += f" ({number(middle - half, form)} to {number(middle + half, form)})"
        return words

    @property
    def side(self) -> str:
        """The limit, as people read it."""
        return f"at {'least' if self.at_least else 'most'} {self.bound:g}"

    def __str__(self) -> str:
        return f"{' '.join(self.who.split())}: {self.what} {self.number}, must be {self.side}"


def findings(
    limits: Mapping[str, float], audited: Method, alone: Method | None, measure: Measure, failed: Sequence[str] = ()
) -> list[Finding]:
    """Every number that is limited, beside its limit.

    Args:
        limits: bounds by the names of :data:`LIMITS`.
        audited: the fits of the method.
        alone: those in which every client trains alone, which the limit of that name needs.
        measure: which of the clients' values count.
        failed: which runs did not come to their end; none may, where ``limits`` do not say so.

    Raises:
        ValueError: a limit needs clients who last, gaps, or clients alone, and there are none.
    """
    found, stage, mode = [], measure.reported_on, measure.mode
    means = audited.numbers(audited.own(measure.metric, stage), stage, mode).get("mean", {})
    without = () if len(means) == len(audited.fits) else _OF_VALUES  # a run ended without a value of anybody
    limits = {**limits, "failed": limits.get("failed", 0)} if failed else limits
    for limit, bound in limits.items():
        for what, at_least, numbers in _limited(limit, audited, alone, measure, failed):
            level = 1 - (1 - _LEVEL) / max(1, len(numbers))
            least = 0.0 - bound if limit == "alone" else bound  # a loss is a negative gain
            each = ((who, None if limit in without else interval(values, level)) for who, values in numbers.items())
            found += [Finding(limit, least, who, what, at_least, number) for who, number in each]
    return found


def _limited(
    limit: str, audited: Method, alone: Method | None, measure: Measure, failed: Sequence[str]
) -> Iterator[_Numbers]:
    if limit == "failed":
        who = ", ".join(failed) or LIMITS[limit]
        yield "failed or interrupted runs", False, {who: dict.fromkeys(audited.fits, float(len(failed)))}
        return
    stage, mode = measure.reported_on, measure.mode
    metric = audited.own(measure.metric, stage)
    if limit in ("mean", "worst_10"):
        yield metric, mode == "max", {LIMITS[limit]: audited.numbers(metric, stage, mode).get(limit, {})}
        return
    clients = by_client(audited, metric, stage)
    if not clients:
        raise ValueError(
            f"{limit} looks at clients one by one, and other divisions of the data have other clients: audit one "
            "division, or give clients names"
        )
    if limit == "clients":
        fewest = min(sum(one in values for values in clients.values()) for one in audited.fits)
        yield f"count of those with a {metric}", True, {"clients": dict.fromkeys(audited.fits, float(fewest))}
    elif limit == "client":
        yield metric, mode == "max", clients if mode != "abs" else _sizes(clients)
    elif limit == "gap":
        last = filter(None, (record.last_values(stage) for record in audited.records))
        modes = {name: found for values in last for name, found in values.modes.items()}
        own = {name: found for name, found in modes.items() if audited.own(name, stage) == name}
        gaps = [name for name, found in own.items() if "abs" in (found, guessed_mode(name))]
        if not gaps:
            raise ValueError(
                f"gap needs a metric of a gap between groups, such as val_parity_gap, found {', '.join(modes)}"
            )
        for name in gaps:  # a client with people of one group has none, but somebody must have one
            known = {who: values for who, values in _sizes(by_client(audited, name, stage)).items() if values}
            yield name, False, known or {LIMITS[limit]: {}}
    elif alone is None:
        raise ValueError("alone needs records in which every client trains alone: compare --bounds local makes them")
    else:
        gained = {gain.client: gain.gained for gain in gains(audited, alone, measure.metric, stage, mode)}
        trained = {
            label_of(record, k) for record in alone.records for k, size in enumerate(record.client_sizes) if size
        }
        expected = {who: values for who, values in gained.items() if values or who in trained}
        yield f"gain in {metric} over training alone", True, expected


def _sizes(clients: Mapping[str, Mapping[Repetition, float]]) -> dict[str, dict[Repetition, float]]:
    return {who: {one: abs(value) for one, value in values.items()} for who, values in clients.items()}
