# SPDX-License-Identifier: Apache-2.0
"""Ratios, checks that every side did the work, and the tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks._peers.race import Lap
from benchmarks._peers.races import HAND_WRITTEN, OURS, Race
from benchmarks._rounds.shape import Shape
from benchmarks._rounds.timing import Median


@dataclass(frozen=True)
class Row:
    """One side of one race.

    Attributes:
        seconds: per round, on the wall.
        ours: the side's time by ours, of rounds next to each other.
        loop: the side's time by that of the race's hand-written loop; ``None`` if there is none.
        steps: local steps per round; ``None`` if the side could not count them.
        norm: median norm of the change of the global parameters.
        accuracy: of the last global parameters on training samples.
        doubts: what speaks against the side having done the same work; empty if nothing does.
    """

    race: str
    side: str
    package: str
    seconds: Median
    ours: Median
    loop: Median | None
    steps: int | None
    norm: float
    accuracy: float
    doubts: str


def rows(race: Race, laps: Mapping[str, Sequence[Lap]], shape: Shape) -> list[Row]:
    """The rows of a race, ours first.

    Raises:
        RuntimeError: ours did not finish.
    """
    packages = {side.name: side.package for side in race.sides}
    own, loops = ([name for name in laps if packages[name] == which] for which in (OURS, HAND_WRITTEN))
    if not own:
        raise RuntimeError(f"{OURS} did not finish the race: {race.what}")
    found = []
    for name, rounds in laps.items():
        steps = {lap.steps for lap in rounds}
        found.append(
            Row(
                race=race.name,
                side=name,
                package=packages[name],
                seconds=Median.of([lap.seconds for lap in rounds]),
                ours=_ratio(rounds, laps[own[0]]),
                loop=_ratio(rounds, laps[loops[0]]) if loops else None,
                steps=steps.pop() if len(steps) == 1 else None,
                norm=statistics.median(lap.norm for lap in rounds),
                accuracy=rounds[-1].accuracy,
                doubts=doubts_of(rounds, laps[own[0]], shape),
            )
        )
    return sorted(found, key=lambda row: (row.package != HAND_WRITTEN, row.package != OURS))


def _ratio(some: Sequence[Lap], other: Sequence[Lap]) -> Median:
    return Median.of([a.seconds / b.seconds for a, b in zip(some, other, strict=True)])


def doubts_of(rounds: Sequence[Lap], ours: Sequence[Lap], shape: Shape) -> str:
    """What speaks against a side having done the work of ours.

    Steps are compared with the shape's; norms and accuracies with ours, since every side draws its own clients.
    """
    doubts = []
    counted = {lap.steps for lap in rounds} - {None}
    if counted and counted != {shape.steps}:
        doubts.append(f"{sorted(counted)} steps per round in place of {shape.steps}")
    norm = statistics.median(lap.norm for lap in rounds) / statistics.median(lap.norm for lap in ours)
    if not 0.8 < norm < 1.25:
        doubts.append(f"its steps are {norm:.2f} times as long")
    behind = ours[-1].accuracy - rounds[-1].accuracy
    if abs(behind) > 0.05:
        doubts.append(f"its accuracy differs by {behind:.2f}")
    return "; ".join(doubts)


def table(race: Race, found: Sequence[Row]) -> str:
    """The Markdown table of a race."""
    lines = [
        f"### {race.what[0].upper()}{race.what[1:]}",
        "",
        "| side | ms/round | x fl_lightning | x hand-written loop | steps | norm of the change | accuracy | doubts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        loop = row.loop.text(2) if row.loop is not None else "-"
        lines.append(
            f"| {row.side} | {1e3 * row.seconds.value:.0f} | {row.ours.text(2)} | {loop} "
            f"| {row.steps or 'not counted'} | {row.norm:.4f} | {row.accuracy:.3f} | {row.doubts or 'none'} |"
        )
    return "\n".join(lines)
