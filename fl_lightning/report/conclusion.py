# SPDX-License-Identifier: Apache-2.0
"""What a comparison comes to: who does best for the clients, and whether they need each other at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isnan
from statistics import fmean
from typing import Literal, NamedTuple

from fl_lightning.arguments.kinds import listed
from fl_lightning.metrics.functional import Mode
from fl_lightning.report.number_formats import STAGES, isolated, notation, number, plural, shortened, spread
from fl_lightning.report.repetitions import Repetition, Spread, mark
from fl_lightning.report.runs_of_a_method import PERSONAL, Method, Stage, goodness, label_of, shown_metrics
from fl_lightning.report.tables import MethodSummary, Summary

LOCAL, POOLED = "local only", "pooled"
"""What the two bounds are called: each client alone, and one model on the data of all."""

Verdict = Literal["better", "worse", "open"]
_MARKS: Mapping[str, Verdict] = {"+": "better", "-": "worse", "": "open"}
_AGAINST_ALONE: Mapping[tuple[Verdict, Verdict], str] = {
    ("worse", "worse"): "Clients are better off alone",
    ("worse", "open"): "Whoever is worst is better off alone",
    ("worse", "better"): "Whoever is worst is better off alone",
    ("open", "worse"): "On average, clients are better off alone",
    ("better", "worse"): "On average, clients are better off alone",
    ("open", "open"): "Clients may be as well off alone",
    ("open", "better"): "On average, clients are worse off alone",
    ("better", "open"): "Whoever is worst is worse off alone",
    ("better", "better"): "Clients are worse off alone",
}
"""How the best methods do against clients that train alone: for whoever is worst, and for the mean."""
_Key = Literal["worst", "mean"]


class _Contrast(NamedTuple):
    """One number of a bound or of the reference, and of a method beside it; better: by more than repetitions differ."""

    base: Spread
    method: str
    value: Spread
    verdict: Verdict
    repetitions: int


class _Finding(NamedTuple):
    """A sentence about whoever is worst and about the mean. The smaller its rank, the more it matters."""

    rank: int
    repetitions: int
    sentence: str


def conclude(rows: Sequence[MethodSummary], metric: str, mode: Mode) -> tuple[list[str], tuple[str, ...]]:
    """What matters most about methods and bounds, a paragraph each; and which of them end with an infinite value.

    The first method is what other methods are compared with; those without values do not count.
    """
    infinite = tuple(row.method for row in rows if row.infinite)
    usable = [row for row in rows if row.numbers.get("worst") and row.numbers.get("mean") and not row.infinite]
    methods = [row for row in usable if not row.bound]
    findings = []
    for bound in (row for row in usable if methods and row.bound in (LOCAL, POOLED)):
        worst, mean = (_contrast(bound, _best(methods, key, mode), key, mode) for key in ("worst", "mean"))
        verdicts = worst.verdict, mean.verdict
        if bound.bound == LOCAL:
            rank = 0 if "worse" in verdicts else 3 if "better" in verdicts else 5
            findings.append(_Finding(rank, worst.repetitions, _alone(worst, mean, len(methods), metric)))
        elif "better" in verdicts:
            findings.append(_Finding(1, worst.repetitions, _pooled(worst, mean, metric)))
    if methods[1:]:
        best = _best(methods[1:], "worst", mode)
        worst, mean = (_contrast(methods[0], best, key, mode) for key in ("worst", "mean"))
        rank = 4 if worst.verdict == "open" and mean.verdict != "better" else 2
        sentence = _helps(worst, mean, methods[0].method, len(methods), metric)
        findings.append(_Finding(rank, worst.repetitions, sentence))
    findings.sort(key=lambda finding: finding.rank)
    found = [finding.sentence for finding in findings]
    if findings and min(finding.repetitions for finding in findings) < 2:
        found[0] += " With one seed, this may be chance."
    elif findings and findings[0].rank >= 4:
        found[0] = f"There is no clear winner: what is compared lies within what repetitions differ by. {found[0]}"
    if infinite:
        found.insert(0, f"With {', '.join(infinite)}, the {metric} of a client is infinite at the end.")
    return found, infinite


def _good(row: MethodSummary, key: _Key, mode: Mode) -> dict[Repetition, float]:
    return {repetition: goodness(value, mode) for repetition, value in row.numbers[key].items()}


def _best(methods: Sequence[MethodSummary], key: _Key, mode: Mode) -> MethodSummary:
    return max(methods, key=lambda row: fmean(_good(row, key, mode).values()))


def _contrast(base: MethodSummary, method: MethodSummary, key: _Key, mode: Mode) -> _Contrast:
    ours, theirs = _good(method, key, mode), _good(base, key, mode)
    repetitions = len(ours.keys() & theirs.keys())
    if repetitions > 1:
        verdict = _MARKS[mark(ours, theirs, larger_is_better=True)]
    else:
        gain = fmean(ours.values()) - fmean(theirs.values())
        verdict = "better" if gain > 0 else "worse" if gain < 0 else "open"
    before, after = (Spread.of(row.numbers[key].values()) for row in (base, method))
    assert before is not None
    assert after is not None
    return _Contrast(before, method.method, after, verdict, repetitions)


def _written(worst: _Contrast, mean: _Contrast) -> list[str]:
    """The worst client's numbers and the means, before and after, all with as many digits."""
    ends = (worst.base, worst.value, mean.base, mean.value)
    form = notation([end.mean for end in ends])
    return [spread(end, form) for end in ends]


def _alone(worst: _Contrast, mean: _Contrast, methods: int, metric: str) -> str:
    head = _AGAINST_ALONE[worst.verdict, mean.verdict]
    low, with_low, middle, with_middle = _written(worst, mean)

    def beside(method: str, number: str) -> str:
        return f"with the methods at best {number} ({method})" if methods > 1 else f"with {method} {number}"

    return (
        f"{head} ({LOCAL}). Whoever is worst has {metric} {low}, {beside(worst.method, with_low)}. The mean is "
        f"{middle}, {beside(mean.method, with_middle)}."
    )


def _pooled(worst: _Contrast, mean: _Contrast, metric: str) -> str:
    """By which numbers pooled data are worse than a method."""
    low, with_low, middle, with_middle = _written(worst, mean)
    sides = (worst, "for whoever is worst", low, with_low), (mean, "on average", middle, with_middle)
    parts = "; and ".join(
        f"than {contrast.method} {whom}, {base} against {value}"
        for contrast, whom, base, value in sides
        if contrast.verdict == "better"
    )
    return f"One model on all data ({POOLED}) does worse in {metric} {parts}."


def _helps(worst: _Contrast, mean: _Contrast, reference: str, methods: int, metric: str) -> str:
    """Which other method does most for whoever is worst, and at what cost of the mean."""
    name, others = worst.method, plural(methods - 1, "other method")
    of = f"Of {others}, " if methods > 2 else ""
    head = {
        "better": f"{of}{name} helps{of and ' most'}",
        "worse": f"None of {others} helps, and {name} comes closest" if of else f"{name} does not help",
        "open": f"{of}{name} comes out best, which may be chance" if of else f"{name} may help or not",
    }[worst.verdict]
    if (worst.verdict, mean.verdict) == ("open", "better"):
        helps = f"does best of {others}. It helps" if of else "helps"
        head = f"{name} {helps} on average; for whoever is worst, that may be chance"
    low, with_low, middle, with_middle = _written(worst, mean)
    return (
        f"{head}: whoever is worst goes from {metric} {low} with {reference} to {with_low}, and the mean from {middle} "
        f"to {with_middle}."
    )


def lede(methods: Sequence[Method], stage: Stage, table: Summary | None) -> list[str]:
    """What a report says first, a paragraph each: what a comparison comes to, and who is worst off."""
    if table is None:
        return ["No evaluation has told the clients apart yet.", "So nobody can say who is worst off."]
    rows = [replace(row, method=_quoted(row.method)) for _, row in table.rows]
    found, infinite = conclude(rows, table.metric, table.mode)
    first, mode = methods[0], table.mode
    if _quoted(first.label) in infinite:
        return [*found, "No number below counts that client, so they cannot say who is worst off."]
    metric = first.own(table.metric, stage)
    points = first.points(metric, stage)
    if not points:
        return [*found, f"{first.label} has no value of {metric} for any client."]
    after = f"After {plural(len(first.first.rounds), 'round')} of {_quoted(first.label)}"
    if len(first.fits) > 1:
        after += f" ({plural(len(first.fits), 'seed')})"
    mean = sum(point.value for point in points) / len(points)
    worst, form = points[0], notation([points[0].value, mean])
    found.append(
        f"{after}, {_quoted(worst.label)} ({plural(worst.size, f'{STAGES[stage]} sample')}) is worst off: its {metric} "
        f"is {number(worst.value, form)}, and the mean of {plural(len(points), 'client')} is {number(mean, form)}."
    )
    without = [one.label for one in first.clients(metric, stage) if isnan(one.value)]
    found[-1] += f" There is no value for {_some(without)}." if without else ""
    for method in methods:
        found += _one_class(method, method.own(table.metric, stage), stage)
    if all(method.is_bound for method in methods[1:]):
        found += _since_the_beginning(first, metric, mode)
    return found


def _one_class(method: Method, metric: str, stage: Stage) -> list[str]:
    """A sentence about clients all of whose samples get one class."""
    own, clients = metric.startswith(PERSONAL), dict[str, None]()
    for record in method.records:
        values = record.last_values(stage)
        for name, some in values.one_class.items() if values is not None else ():
            clients |= {label_of(record, c): None for c in some if name.startswith(PERSONAL) == own}
    if not clients:
        return []
    words = "get one class, though they are of several: accuracy there is the share of that class."
    return [f"With {_quoted(method.label)}, all samples of {_some(list(clients))} {words}"]


def _some(labels: list[str]) -> str:
    more = [plural(len(labels) - 4, "client")] if len(labels) > 5 else list(map(_quoted, labels[4:]))
    return listed([*map(_quoted, labels[:4]), *more], "and")


def _quoted(label: str) -> str:
    return isolated(shortened(label, 60))


def _since_the_beginning(method: Method, metric: str, mode: Mode) -> list[str]:
    """How the worst client and the gap to the mean have changed since the first validation."""
    names = [name for _, one, (name,) in shown_metrics([method], "val") if one == mode]
    name = metric if metric in names else next(iter(names), "")
    found = [values for values in method.first.evaluations if values.stage == "val" and name in values.values]
    ends = [[v for v in values.values[name] if v is not None] for values in (found[:1] + found[1:][-1:])]
    if len(ends) < 2 or not all(ends):
        return ["There is no earlier evaluation to compare with, so whether the method changed that remains open."]
    worst = [min(values, key=lambda value: goodness(value, mode)) for values in ends]
    gaps = [abs(fmean(values) - low) for values, low in zip(ends, worst, strict=True)]
    change = goodness(worst[1], mode) - goodness(worst[0], mode)
    better = "is better off" if change > 0 else "is worse off" if change < 0 else "is where it was"
    gap = "narrowed" if gaps[1] < gaps[0] else "widened" if gaps[1] > gaps[0] else "stayed the same"
    again, form = "" if name == metric else f" by {name}", notation([*worst, *gaps])
    (first, last), (wide, narrow) = ([number(value, form) for value in pair] for pair in (worst, gaps))
    return [
        f"Since the validation after {plural(found[0].round, 'round')}, whoever is worst{again} {better} "
        f"(from {first} to {last}), and the gap to the mean has {gap} (from {wide} to {narrow})."
    ]
