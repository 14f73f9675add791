# SPDX-License-Identifier: Apache-2.0
"""What a comparison comes to: who does best for the clients, and whether they need each other at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from fl_lightning.metrics.functional import Mode
from fl_lightning.report.number_formats import Spread, notation, plural, spread
from fl_lightning.report.repetitions import Repetition, mark
from fl_lightning.report.runs_of_a_method import goodness

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


@dataclass(frozen=True)
class Standing:
    """How the clients of one method or bound stand at the end.

    Attributes:
        label: its name.
        worst: by repetition, the value of the client that is worst off.
        mean: by repetition, the mean over the clients.
        bound: :data:`LOCAL` or :data:`POOLED`; empty for a method.
        infinite: a client's value is infinite in one of the repetitions.
    """

    label: str
    worst: Mapping[Repetition, float]
    mean: Mapping[Repetition, float]
    bound: str = ""
    infinite: bool = False


@dataclass(frozen=True)
class Contrast:
    """One number of a bound or of the reference, and of a method beside it.

    Attributes:
        base: the number of the bound or the reference.
        method: name of the method.
        value: its number.
        verdict: whether the method is better, by more than repetitions differ; with a single one, by any amount.
        repetitions: how many both have.
    """

    base: Spread
    method: str
    value: Spread
    verdict: Verdict
    repetitions: int


@dataclass(frozen=True)
class Finding:
    """What a comparison says about one question.

    Attributes:
        about: ``"alone"``: whether clients need each other; ``"pooled"``: pooled data are worse than a method;
            ``"method"``: whether a method does more for whoever is worst than the reference.
        worst: of the client that is worst off.
        mean: of the mean over the clients.
    """

    about: Literal["alone", "pooled", "method"]
    worst: Contrast
    mean: Contrast

    @property
    def rank(self) -> int:
        """The smaller, the more it matters: federating in vain comes first, what cannot be told last."""
        verdicts = (self.worst.verdict, self.mean.verdict)
        if self.about == "method":
            return 4 if self.worst.verdict == "open" and self.mean.verdict != "better" else 2
        if self.about == "pooled":
            return 1
        return 0 if "worse" in verdicts else 3 if "better" in verdicts else 5


@dataclass(frozen=True)
class Conclusion:
    """What a comparison comes to.

    Attributes:
        metric: name of the clients' values.
        reference: name of the first method.
        methods: how many methods there are, the reference included.
        infinite: names of those under which a client's value is infinite at the end; they are left out.
        findings: what matters most comes first.
    """

    metric: str
    reference: str
    methods: int
    infinite: tuple[str, ...]
    findings: tuple[Finding, ...]

    def paragraphs(self, called: Callable[[str], str] = str) -> list[str]:
        """In words."""
        texts = {"alone": _alone, "pooled": _pooled, "method": _method}
        found = [
            texts[finding.about](self, finding, called, "" if place else f"{self.metric} ")
            for place, finding in enumerate(self.findings)
        ]
        seeds = min((finding.worst.repetitions for finding in self.findings), default=0)
        if found and seeds < 2:
            found[0] += " With one seed, this may be chance."
        elif found and self.findings[0].rank >= 4:
            found[0] = f"There is no clear winner: what is compared lies within what repetitions differ by. {found[0]}"
        if self.infinite:
            names = ", ".join(map(called, self.infinite))
            found.insert(0, f"With {names}, the {self.metric} of a client is infinite at the end.")
        return found


def conclude(standings: Sequence[Standing], metric: str, mode: Mode) -> Conclusion:
    """What matters most about some methods and bounds.

    Args:
        standings: the first method is what other methods are compared with; those without values do not count.
        metric: name of the values.
        mode: which of them are good.
    """
    usable = [one for one in standings if one.worst and one.mean and not one.infinite]
    methods = [one for one in usable if not one.bound]
    findings = []
    if methods:
        for bound in (one for one in usable if one.bound in (LOCAL, POOLED)):
            worst, mean = (_best(methods, key, mode) for key in ("worst", "mean"))
            about: Literal["alone", "pooled"] = "alone" if bound.bound == LOCAL else "pooled"
            pair = _contrast(bound, worst, "worst", mode), _contrast(bound, mean, "mean", mode)
            if about == "alone" or "better" in (pair[0].verdict, pair[1].verdict):
                findings.append(Finding(about, *pair))
        if methods[1:]:
            best = _best(methods[1:], "worst", mode)
            pair = _contrast(methods[0], best, "worst", mode), _contrast(methods[0], best, "mean", mode)
            findings.append(Finding("method", *pair))
    return Conclusion(
        metric=metric,
        reference=methods[0].label if methods else "",
        methods=len(methods),
        infinite=tuple(one.label for one in standings if one.infinite),
        findings=tuple(sorted(findings, key=lambda finding: finding.rank)),
    )


Key = Literal["worst", "mean"]


def _numbers(one: Standing, key: Key) -> Mapping[Repetition, float]:
    return one.worst if key == "worst" else one.mean


def _good(one: Standing, key: Key, mode: Mode) -> dict[Repetition, float]:
    return {repetition: goodness(value, mode) for repetition, value in _numbers(one, key).items()}


def _best(methods: Sequence[Standing], key: Key, mode: Mode) -> Standing:
    return max(methods, key=lambda one: fmean(_good(one, key, mode).values()))


def _contrast(base: Standing, method: Standing, key: Key, mode: Mode) -> Contrast:
    ours, theirs = _good(method, key, mode), _good(base, key, mode)
    repetitions = len(ours.keys() & theirs.keys())
    if repetitions > 1:
        verdict = _MARKS[mark(ours, theirs, larger_is_better=True)]
    else:
        gain = fmean(ours.values()) - fmean(theirs.values())
        verdict = "better" if gain > 0 else "worse" if gain < 0 else "open"
    ends = [Spread.over(_numbers(one, key)) for one in (base, method)]
    assert ends[0] is not None
    assert ends[1] is not None
    return Contrast(ends[0], method.label, ends[1], verdict, repetitions)


def _written(finding: Finding) -> list[str]:
    """The numbers of a finding, all with as many digits: the worst client's and the mean, before and after."""
    ends = (finding.worst.base, finding.worst.value, finding.mean.base, finding.mean.value)
    form = notation([end.mean for end in ends])
    return [spread(end, form) for end in ends]


def _alone(conclusion: Conclusion, finding: Finding, called: Callable[[str], str], metric: str) -> str:
    """How clients fare alone, and how with the methods."""
    head = _AGAINST_ALONE[finding.worst.verdict, finding.mean.verdict]
    worst, with_worst, mean, with_mean = _written(finding)

    def beside(method: str, number: str) -> str:
        several = conclusion.methods > 1
        return f"with the methods at best {number} ({called(method)})" if several else f"with {called(method)} {number}"

    return (
        f"{head} ({LOCAL}). Whoever is worst has {metric}{worst}, {beside(finding.worst.method, with_worst)}. The mean "
        f"is {mean}, {beside(finding.mean.method, with_mean)}."
    )


def _pooled(conclusion: Conclusion, finding: Finding, called: Callable[[str], str], metric: str) -> str:
    """By which numbers pooled data are worse than a method."""
    worst, with_worst, mean, with_mean = _written(finding)
    parts = [
        f"than {called(contrast.method)} {whom}, {base} against {value}"
        for contrast, whom, base, value in (
            (finding.worst, "for whoever is worst", worst, with_worst),
            (finding.mean, "on average", mean, with_mean),
        )
        if contrast.verdict == "better"
    ]
    return f"One model on all data ({POOLED}) does worse {metric and f'in {metric}'}{'; and '.join(parts)}."


def _method(conclusion: Conclusion, finding: Finding, called: Callable[[str], str], metric: str) -> str:
    """Which other method does most for whoever is worst, and at what cost of the mean."""
    name, others = called(finding.worst.method), plural(conclusion.methods - 1, "other method")
    of = f"Of {others}, " if conclusion.methods > 2 else ""
    head = {
        "better": f"{of}{name} helps{of and ' most'}",
        "worse": f"None of {others} helps, and {name} comes closest" if of else f"{name} does not help",
        "open": f"{of}{name} comes out best, which may be chance" if of else f"{name} may help or not",
    }[finding.worst.verdict]
    if (finding.worst.verdict, finding.mean.verdict) == ("open", "better"):
        head = f"{of}{name} helps on average, and may help whoever is worst"
    worst, with_worst, mean, with_mean = _written(finding)
    return (
        f"{head}: whoever is worst goes from {metric}{worst} with {called(conclusion.reference)} to {with_worst}, and "
        f"the mean from {mean} to {with_mean}."
    )
