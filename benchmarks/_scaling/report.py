# SPDX-License-Identifier: Apache-2.0
"""Ratios of turns, where the time goes, and bytes beside the formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from benchmarks._peers.race import Lap
from benchmarks._peers.report import doubts_of
from benchmarks._rounds.shape import Shape
from benchmarks._rounds.timing import Median
from benchmarks._scaling.races import OURS, Entry, ScalingRace

PARTS = ("training", "exchange", "replay", "server step", "evaluation")


@dataclass(frozen=True)
class Row:
    """An entry of a race.

    Attributes:
        shape: what was trained.
        race: of which race.
        side: the entry.
        ranks: processes.
        per_round: clients per round.
        seconds: of a round, on the wall.
        by_one: the same by those of the package on one process, turn by turn.
        least: what the division of clients allows for that.
        cpu: processor seconds of the process that used most.
        cpu_by_one: the same by those of one process.
        parts: seconds on the wall by part of the round: least, mean and most over processes; medians over turns.
        sent: bytes sent by a process, mean over processes, median over turns.
        formula: bytes that a process has to send.
        by_ours: seconds by ours on as many processes, turn by turn.
        doubts: what speaks against the entry having done the work of ours; empty if nothing does.
    """

    shape: str
    race: str
    side: str
    ranks: int
    per_round: int
    seconds: Median
    by_one: Median
    least: float
    cpu: Median
    cpu_by_one: Median
    parts: dict[str, tuple[float, float, float]]
    sent: float
    formula: float
    by_ours: Median
    doubts: str


def rows(race: ScalingRace, turns: Sequence[Mapping[str, Lap]], shape: Shape) -> list[Row]:
    """One row per entry that took part in all turns."""
    parameters = sum(p.numel() for p in shape.initial().parameters())
    laps = {entry: [turn[entry.side.name] for turn in turns if entry.side.name in turn] for entry in race.entries}
    present = [entry for entry, found in laps.items() if len(found) == len(turns) > 0]
    return [_row(race, entry, laps, present, shape, parameters) for entry in present]


def _row(
    race: ScalingRace,
    entry: Entry,
    laps: Mapping[Entry, Sequence[Lap]],
    present: Sequence[Entry],
    shape: Shape,
    parameters: int,
) -> Row:
    own = laps[entry]
    one = next((e for e in present if e.package == entry.package and e.ranks == 1), entry)
    ours = next((e for e in present if e.package == OURS and e.ranks == entry.ranks), entry)

    def ratio(other: Entry, value: Callable[[Lap], float]) -> Median:
        return Median.of([value(a) / value(b) for a, b in zip(own, laps[other], strict=True)])

    leasts = [lap.least for lap in own if lap.least is not None]
    doubts = "" if leasts else doubts_of(own, laps[ours], replace(shape, per_round=entry.per_round))
    bits = [[(lap.norm, lap.accuracy) for lap in found] for found in (own, laps[one])]
    if entry.package == OURS and entry.per_round == one.per_round and bits[0] != bits[1]:
        doubts = "; ".join([*filter(None, [doubts]), "other bits than one process"])
    return Row(
        shape=shape.name,
        race=race.name,
        side=entry.package,
        ranks=entry.ranks,
        per_round=entry.per_round,
        seconds=Median.of([lap.seconds for lap in own]),
        by_one=ratio(one, lambda lap: lap.seconds),
        least=median(leasts) if leasts else entry.least / one.least,
        cpu=Median.of([_busiest(lap) for lap in own]),
        cpu_by_one=ratio(one, _busiest),
        parts=_parts(own),
        sent=median(fmean(rank["sent"] for rank in lap.ranks) for lap in own),
        formula=entry.bytes(parameters),
        by_ours=ratio(ours, lambda lap: lap.seconds),
        doubts=doubts,
    )


def _busiest(lap: Lap) -> float:
    return max(float(rank["cpu"]) for rank in lap.ranks)


def _parts(laps: Sequence[Lap]) -> dict[str, tuple[float, float, float]]:
    """Least, mean and most over processes, by part; the rest is a part, too."""

    def over(which: Callable[[Sequence[float]], float], part: str) -> float:
        return median(which([_part(rank, part) for rank in lap.ranks]) for lap in laps)

    return {part: (over(min, part), over(fmean, part), over(max, part)) for part in (*PARTS, "rest")}


def _part(rank: Mapping[str, object], part: str) -> float:
    parts: Mapping[str, Sequence[float]] = rank["parts"]  # type: ignore[assignment]
    if part == "rest":
        return float(rank["seconds"]) - sum(seconds for seconds, _ in parts.values())  # type: ignore[arg-type]
    return parts.get(part, (0.0,))[0]


_TIMES = (
    "| side | processes | ms/round | by one process | least possible | by the least possible "
    "| busiest process, CPU s | by one process | by fl_lightning | doubts |\n|---|---|---|---|---|---|---|---|---|---|"
)
_PARTS = (
    "| side | processes | training | exchange | replay | server step | evaluation | rest | MB sent by a process "
    "| formula | by the formula |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def tables(race: ScalingRace, found: Sequence[Row]) -> str:
    """The Markdown tables of a race."""
    told = [row for row in found if row.ranks > 1 or any(row.parts[part][2] for part in PARTS)]
    above = f"### {found[0].shape}: {race.what}"
    between = "Milliseconds of a round, mean and most over processes; of the exchange also the least:"
    return "\n".join([above, "", _TIMES, *map(_times, found), "", between, "", _PARTS, *map(_split, told)]) + "\n"


def _times(row: Row) -> str:
    return (
        f"| {row.side} | {row.ranks} | {1e3 * row.seconds.value:.0f} | {row.by_one.text()} | {row.least:.3f} "
        f"| {row.by_one.value / row.least:.2f} | {row.cpu.value:.3f} | {row.cpu_by_one.text()} "
        f"| {row.by_ours.text(2)} | {row.doubts or 'none'} |"
    )


def _split(row: Row) -> str:
    cells = " | ".join(_cell(row, part) for part in (*PARTS, "rest"))
    formula = f"{row.formula / 1e6:.2f} | {row.sent / row.formula:.2f}" if row.formula else "- | -"
    return f"| {row.side} | {row.ranks} | {cells} | {row.sent / 1e6:.2f} | {formula} |"


def _cell(row: Row, part: str) -> str:
    least, mean, most = (1e3 * seconds for seconds in row.parts[part])
    if not any(row.parts[name][2] for name in PARTS) or (most == 0):
        return "-"
    if row.ranks == 1:
        return f"{most:.1f}"
    return f"{least:.1f}, {mean:.1f}, {most:.1f}" if part == "exchange" else f"{mean:.1f}, {most:.1f}"
