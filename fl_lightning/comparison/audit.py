# SPDX-License-Identifier: Apache-2.0
"""``fl.audit``: whether a trained model keeps limits for every client, and a card that says it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from fl_lightning.algorithms.records import READS
from fl_lightning.arguments import FILLED, checked, nearest
from fl_lightning.comparison.limits import LIMITS, Finding, findings
from fl_lightning.comparison.plan import Measure, measure_of
from fl_lightning.core.storage.files import write_text
from fl_lightning.report import FitRecord, RoundSeries, record_to_json
from fl_lightning.report.conclusion import LOCAL
from fl_lightning.report.gains import by_client, gain_cells, gains, trained_alone
from fl_lightning.report.number_formats import STAGES, interval_words, isolated, plural
from fl_lightning.report.page import table_page
from fl_lightning.report.repetitions import Interval, interval
from fl_lightning.report.runs_of_a_method import Method, by_method, label_of, repetition_label
from fl_lightning.report.tables import Part, Table, runs

_SEEN = ("reads", "clients_also_send", "guard", "attack", "epsilon")
"""Settings that say what the server saw of clients."""
_NAMED = 5
_UNKNOWN = {"module": "a module", "trained parameters": "unknown"}


@dataclass(frozen=True)
class Audit:
    """What an audit found; ``print`` shows it.

    Attributes:
        method: the fits of the method that is audited.
        alone: those in which every client trains alone, if there are any.
        measure: which of the clients' values count.
        findings: every number that is limited, beside its limit.
        strict: chance is no excuse.
    """

    method: Method
    alone: Method | None
    measure: Measure
    findings: Sequence[Finding]
    strict: bool

    @property
    def broken(self) -> list[Finding]:
        """The numbers that break their limits: beyond chance, or with ``strict`` at all."""
        return [one for one in self.findings if self._breaks(one)]

    def _breaks(self, one: Finding) -> bool:
        return one.broken if self.strict else one.beyond_chance

    @property
    def passed(self) -> bool:
        """No limit is broken."""
        return not self.broken

    @property
    def never_evaluated(self) -> list[str]:
        """Clients that trained, and have no value in the last evaluation of any fit."""
        valued = {label_of(record, k) for record in self.method.records for k in _valued(record, self.measure)}
        known = {label_of(r, k): size for r in self.method.records for k, size in enumerate(r.client_sizes)}
        return [name for name, size in known.items() if size and name not in valued]

    def __str__(self) -> str:
        return "\n".join([self._verdict, *(f"  {one}" for one in self.broken), *self._others])

    @property
    def _verdict(self) -> str:
        of = f"{self.method.label}, {self.method.repeated}"
        if self.passed:
            return f"passed: {of}, keeps {plural(len({one.limit for one in self.findings}), 'limit')}"
        chance = "" if self.strict else " beyond chance"
        limits = ", ".join(dict.fromkeys(one.limit for one in self.broken))
        return f"failed: {of}, breaks {limits}{chance}:"

    @property
    def _others(self) -> list[str]:
        unsure = [one for one in self.findings if one.broken and not self._breaks(one)]
        found = ["On the wrong side, but within chance:", *(f"  {one}" for one in unsure)] if unsure else []
        missing = self.never_evaluated
        return found + [f"Never evaluated: {', '.join(missing)}."] * bool(missing)

    @checked()
    def write(self, path: str | Path, files: Iterable[str | Path] = ()) -> list[Path]:
        """Writes the card: a page, and beside it the same as JSON.

        Args:
            path: the page; the JSON has the suffix ``.json``.
            files: weights, records and whatever else the card is about; it holds their SHA-256.

        Returns:
            What was written.

        Raises:
            ImportError: jinja2, which the extra ``report`` brings, is missing.
            ValueError: the page has the suffix ``.json``.
        """
        page = Path(path)
        if page.suffix == ".json":
            raise ValueError(f"path must name the page, such as audit.html, beside which audit.json lies, found {path}")
        digests = {str(file): hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}
        found, first, stage = self.measure, self.method.first, self.measure.reported_on
        last = filter(None, (record.last_values(stage) for record in self.method.records))
        columns = {
            metric: {who: interval(values) for who, values in by_client(self.method, metric, stage).items()}
            for metric in dict.fromkeys(name for values in last for name in values.values)
        }
        each = [] if self.alone is None else gains(self.method, self.alone, found.metric, stage, found.mode)
        gained = {gain.client: {"gain": gain_cells(gain)[3], "advice": gain.advice} for gain in each}
        lede = [self._verdict, *(str(replace(one, who=isolated(one.who))) for one in self.broken[:_NAMED])]
        heading = f"Audit of {self.method.label}: {'passed' if self.passed else 'failed'}"
        write_text(page, table_page(heading, lede, self._parts(columns, gained, digests)))
        plain = {
            "passed": self.passed, "strict": self.strict, "method": self.method.label, "metric": found.metric,
            "stage": stage,
            "findings": [
                {**asdict(one), "interval": _ends(one.interval), "result": self._word(one)} for one in self.findings
            ],
            "clients": {name: {who: _ends(one) for who, one in column.items()} for name, column in columns.items()},
            "gains": gained, "never_evaluated": self.never_evaluated, "server_saw": _seen(first),
            "repetitions": [one._asdict() for one in self.method.fits], "sha256": digests,
            "fit": json.loads(record_to_json(replace(first, rounds=RoundSeries(), metrics=(), evaluations=()))),
        }  # fmt: skip
        write_text(page.with_suffix(".json"), json.dumps(plain, indent=1, allow_nan=False))
        return [page, page.with_suffix(".json")]

    def _parts(
        self, columns: Mapping[str, Mapping[str, Interval | None]], gained: Mapping[str, Mapping[str, str]],
        digests: Mapping[str, str],
    ) -> list[Part]:  # fmt: skip
        limits = [[f"{one.limit}={abs(one.bound):g}", one.who, one.what, one.number, one.side, self._word(one)]
                  for one in sorted(self.findings, key=lambda one: not self._breaks(one))]  # fmt: skip
        clients = [
            [who, *(interval_words(column.get(who)) for column in columns.values()), *gained.get(who, {}).values()]
            for who in dict.fromkeys(who for column in columns.values() for who in column)
        ]
        first, divisions = self.method.first, {record.division for record in self.method.records}
        data = [
            ["clients", f"{len(first.client_names):,}"], ["training samples", f"{sum(first.client_sizes):,}"],
            ["divisions of the data", f"{len(divisions):,}"], ["runs", self.method.repeated],
            ["numbers are those of", f"{STAGES[self.measure.reported_on]} data"],
            ["never evaluated", ", ".join(self.never_evaluated) or "nobody"],
        ]  # fmt: skip
        seen = [[name, value if isinstance(value, str) else json.dumps(value)] for name, value in _seen(first).items()]
        head = ["client", *columns, *(["gain over training alone", "the client is"] if gained else [])]
        parts = [
            Part("Limits", [Table(limits, "text", ["limit", "who", "what", "number (interval)", "must be", ""])],
                 "Intervals of one limit hold together in 95 of 100 cases."),
            Part("Every client", [Table(clients, "numbers", head)], "With 95 % intervals over the runs."),
            Part("Data", [Table(data, "text")]), Part("What the server saw", [Table(seen, "text")]),
            runs([self.method]), Part("SHA-256", [Table([*map(list, digests.items())], "text")] * bool(digests)),
        ]  # fmt: skip
        return [part for part in parts if part]

    def _word(self, one: Finding) -> str:
        return "broken" if self._breaks(one) else "within chance" if one.broken else "kept"


@checked(records=FILLED)
def audit(
    records: Sequence[FitRecord],
    limits: Mapping[str, float],
    *,
    method: str | None = None,
    metric: str | None = None,
    strict: bool = False,
) -> Audit:
    """Looks whether the clients' values at the end of fits keep limits.

    Args:
        records: fits of the method with several seeds or divisions, and for the limit ``alone`` those of clients that
            train alone, as :func:`fl_lightning.compare` makes them. Fits that are not ``"finished"`` count as failed.
        limits: bounds by name. ``mean``, ``worst_10`` (the mean over the worst tenth) and ``client`` (each of them)
            bound the metric from its bad side; ``gap`` bounds the size of each client's values of every metric of a gap
            between groups; ``alone`` bounds what a client may lose by not training alone; ``clients`` is the least
            number of clients with a value; ``failed`` is the largest number of fits that failed, 0 if left out.
        method: which method is audited, where there are records of several.
        metric: whose values count; by default the first where large values are good, or else the first.
        strict: a number on the wrong side breaks its limit, even if that may be chance.

    Returns:
        What was found.

    Raises:
        ValueError: a limit is unknown or cannot be looked at, a name is, or one run has to tell what is chance.
    """
    if not limits:
        raise ValueError(f"limits must hold one limit or more, of {', '.join(LIMITS)}, found none")
    for name in limits:
        if name not in LIMITS:
            raise ValueError(f"limits must be of {', '.join(LIMITS)}, found {name!r}{nearest(name, LIMITS)}")
    methods = {one.label: one for one in by_method([record for record in records if record.status == "finished"])}
    named = [label for label, one in methods.items() if not one.is_bound]
    if not named:
        raise ValueError(f"records must have a finished fit of a method, found none among {len(records)}")
    if (method is None and len(named) != 1) or (method is not None and method not in named):
        raise ValueError(f"method must be one of {', '.join(named)}, "
                         f"found {method!r}{nearest(method or '', named)}")  # fmt: skip
    audited = methods[named[0] if method is None else method]
    if len(audited.fits) < 2 and not strict:
        raise ValueError(
            f"there must be two runs of {audited.label} or more to tell what is chance, found 1: train it with other "
            "seeds, or take every number as it is (strict)"
        )
    for place, one in enumerate(audited.records):
        if any((one.seed, one.evaluations) == (other.seed, other.evaluations) for other in audited.records[:place]):
            raise ValueError(
                f"records must hold every run once, found {repetition_label(one)} of {audited.label} twice"
            )
        if (task := _task(one)) != _task(audited.first):
            raise ValueError(f"records must be of one task, found {_task(audited.first)} and {task}")
    measure = measure_of(audited.first, several_rates=False, metric=metric, select="mean")
    alone, counted = trained_alone(methods.values()), (audited.first.method, *([LOCAL] if "alone" in limits else []))
    over = [record for record in records if record.status != "finished" and record.method in counted]
    failed = [f"{record.method}, {repetition_label(record)}" for record in over]
    return Audit(audited, alone, measure, findings(limits, audited, alone, measure, failed), strict)


def _seen(record: FitRecord) -> dict[str, Any]:
    """What the server saw of clients, as far as the record says it."""
    found = {name: value for name in _SEEN if (value := record.settings.get(name)) not in (None, "", [])}
    return {**found, "reads": READS[found["reads"]]} if "reads" in found else found


def _task(record: FitRecord) -> str:
    return "{module} with {trained parameters} trained parameters".format_map({**_UNKNOWN, **record.configuration})


def _valued(record: FitRecord, measure: Measure) -> set[int]:
    found = record.last_values(measure.reported_on)
    columns = [] if found is None else [zip(found.client_ids, values, strict=True) for values in found.values.values()]
    return {client for column in columns for client, value in column if value is not None}


def _ends(found: Interval | None) -> dict[str, float | None] | None:
    if found is None:
        return None
    return {"value": found.middle, "half_width": found.half if isfinite(found.half) else None}
