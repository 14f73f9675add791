# SPDX-License-Identifier: Apache-2.0
"""What an experiment is: cases that are run for some seeds, and the published figures to lay beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.papers.records import Line, Run, encode, read, recorded, replace, slug

Drawing = Callable[[Mapping[str, Mapping[int, list[Line]]], Path], None]
"""Draws an experiment's lines by case and seed into a file."""


@dataclass(frozen=True)
class Job:
    """One run: a case with one seed.

    Attributes:
        experiment: its name.
        case: the case's name.
        seed: root of all randomness.
        rounds: how many to reach.
        root: folder of the data sets.
        out: folder of the results.
        accelerator: as for a Lightning Trainer.
        origin: versions and commit, which go into every line.
    """

    experiment: str
    case: str
    seed: int
    rounds: int
    root: Path
    out: Path
    accelerator: str
    origin: Mapping[str, str]

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.experiment}/{self.case}, seed {self.seed}"

    @property
    def run(self) -> Run:
        """For records."""
        return slug(self.case), self.seed

    @property
    def lines(self) -> Path:
        """Where the lines go while the run goes on."""
        return self.out / self.experiment / f"{slug(self.case)}-seed{self.seed}.jsonl"

    @property
    def lock(self) -> Path:
        """What the process that is at the run holds."""
        return self.lines.with_suffix(".lock")

    @property
    def checkpoint(self) -> Path:
        """Where a run that is not complete keeps its state."""
        return self.lines.with_suffix(".ckpt")

    def recorded(self) -> list[Line]:
        """The lines, wherever they are."""
        return recorded(self.out, self.experiment).get(self.run, [])


@dataclass
class Log:
    """Writes the lines of one run, each at once; ``tick`` tells whoever waits how far the run is."""

    job: Job
    tick: Callable[[int], None] = field(default=lambda done: None)

    def cut(self, rounds: int) -> None:
        """Drops lines after ``rounds``, which an interrupted run wrote and a resumed one will write again."""
        path = self.job.lines
        known = read(path) if path.is_file() else self.job.recorded()
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, encode(line for line in known if line["round"] <= rounds), path.with_suffix(".new"))

    def write(self, rounds: int, metrics: Mapping[str, float | list[float]], seconds: float) -> None:
        """Adds a line."""
        job = self.job
        known = {"experiment": job.experiment, "case": job.case, "seed": job.seed, "round": rounds}
        line = {**known, **metrics, "seconds": round(seconds, 2), **job.origin}
        with job.lines.open("ab") as file:
            file.write(encode([line]))


class Case(ABC):
    """One row of a table.

    Attributes:
        name: ``group: label``, or the label alone.
        rounds: of a complete run, as published unless the experiment's deviations say otherwise.
        seeds: the seeds to run.
        published: metric to figure.
    """

    name: str
    rounds: int
    seeds: tuple[int, ...]
    published: Mapping[str, float]

    @property
    def group(self) -> str:
        """Cases of one group share a table."""
        return self.name.rpartition(": ")[0]

    @property
    def label(self) -> str:
        """Name within the group."""
        return self.name.rpartition(": ")[2]

    @abstractmethod
    def check(self, root: Path) -> None:
        """Raises MissingDataError unless the data is there."""

    @abstractmethod
    def cost(self, rounds: int) -> float:
        """Seconds that so many rounds will take on one core, roughly."""

    @abstractmethod
    def execute(self, job: Job, log: Log) -> None:
        """Runs until ``job.rounds``, from the last checkpoint if there is one."""


@dataclass(frozen=True)
class Experiment:
    """A table of a paper.

    Attributes:
        name: on the command line.
        title: heading of the report.
        cases: in the order of the table.
        metrics: columns, by the names of the lines.
        last: evaluations at the end that are averaged.
        deviations: how the setting differs from the published one.
        reach: a mean accuracy; the table says after how many rounds an evaluation had it.
        draw: draws something else than curves over the rounds.
    """

    name: str
    title: str
    cases: tuple[Case, ...]
    metrics: tuple[str, ...] = ("mean", "angle")
    last: int = 1
    deviations: tuple[str, ...] = ()
    reach: float | None = None
    draw: Drawing | None = None

    def __post_init__(self) -> None:
        names = [slug(case.name) for case in self.cases]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"cases of {self.name} must have names of their own, found {twice} more than once")
