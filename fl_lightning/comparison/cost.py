# SPDX-License-Identifier: Apache-2.0
"""What runs will take, from a timed round of each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_lightning.comparison.plan import Plan
from fl_lightning.metrics.functional import Mode
from fl_lightning.report.conclusion import LOCAL


@dataclass(frozen=True)
class Timing:
    """What a timed round says of a run.

    Attributes:
        fits: how many fits the run has: one, or one per client.
        rounds: rounds of a fit.
        round_seconds: seconds of a round with its validation.
        other_seconds: seconds of a fit besides.
        metrics: by stage, the metrics that the clients have values of, and which of their values are good.
    """

    fits: int
    rounds: int
    round_seconds: float
    other_seconds: float
    metrics: Mapping[str, Mapping[str, Mode]]

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return self.fits * (self.other_seconds + self.rounds * self.round_seconds)

    @property
    def step_seconds(self) -> float:
        """Of a run, per round that it tells of."""
        return self.seconds / max(1, self.fits * self.rounds)


def duration(seconds: float) -> str:
    """Such as ``"1 h 20 min"``, ``"3 min 10 s"`` or ``"4.2 s"``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 10:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def cost_text(plan: Plan, counts: Mapping[str, int], timings: Mapping[str, Timing], jobs: int) -> str:
    """Says what is to be done and how long it will take."""
    waiting = sum(counts.values())
    word = "seed" if plan.divisions == 1 else "repetition"
    each = f"{_several(plan.learning_rates, 'learning rate')} x {_several(plan.picking, word)}"
    if plan.others:
        each = f"({each}, {_several(plan.others, word)} more with the picked one)"
    lines = [f"{len(plan.methods)} methods x {each} = {len(plan)} runs, of which {len(plan) - waiting} are finished"]
    width = max(map(len, plan.methods))
    for method, count in counts.items():
        timing = timings.get(method)
        if count and timing is None:
            lines.append(f"  {method:<{width}}  {count:>3} runs; the timed round failed")
        elif count and timing is not None:
            fits = f" (of {timing.fits} clients, one after the other)" if method == LOCAL else ""
            lines.append(
                f"  {method:<{width}}  {count:>3} runs of {timing.rounds} rounds, about {duration(timing.seconds)} each"
                f"{fits}"
            )
    seconds = [timings[method].seconds for method, count in counts.items() for _ in range(count) if method in timings]
    if seconds:
        total = max(sum(seconds) / jobs, max(seconds))
        lines.append(f"together about {duration(total)} with {jobs} at a time (--jobs {jobs})")
    return "\n".join(lines)


def _several(values: Sequence[object], word: str) -> str:
    return f"{len(values)} {word}{'s' * (len(values) > 1)}"
