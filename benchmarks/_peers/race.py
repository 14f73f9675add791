# SPDX-License-Identifier: Apache-2.0
"""All sides of a race take turns, round by round, so that they share whatever else the machine does."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Side:
    """One program that runs rounds.

    Attributes:
        name: as the table has it.
        command: the program with its arguments, without shape and rounds.
        package: whose it is; several sides of one package are its ways to use both cores.
    """

    name: str
    command: tuple[str, ...]
    package: str


@dataclass(frozen=True)
class Lap:
    """One round of one side.

    Attributes:
        seconds: on the wall.
        norm: Euclidean norm of the change of the global parameters.
        accuracy: of the new global parameters on two thousand training samples.
        steps: local steps, if the side could count them.
        least: what the division of the round's clients allows, by the time of one process, if the side says so.
        ranks: what each of the side's processes reports, see :class:`benchmarks._peers.meter.Meter`.
    """

    seconds: float
    norm: float
    accuracy: float
    steps: int | None
    ranks: Sequence[dict[str, Any]] = ()
    least: float | None = None


class _Runner:
    def __init__(self, side: Side, shape: str, rounds: int, threads: int, folder: Path) -> None:
        self.side = side
        self._log = (folder / f"{side.name.replace(' ', '-').replace(',', '')}.log").open("w+")
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore",
            "RAY_DEDUP_LOGS": "0", "FLWR_HOME": str(folder / "flwr"),
        }  # fmt: skip
        # PYTHONPATH is inherited: Flower's workers are new interpreters and import the clients' code.
        self._process = subprocess.Popen(
            [*side.command, "--shape", shape, "--rounds", str(rounds), "--threads", str(threads)],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip

    def hear(self) -> dict[str, Any]:
        """The next report.

        Raises:
            RuntimeError: the side has ended; the message holds its last words.
        """
        out: IO[str] = self._process.stdout  # type: ignore[assignment]
        line = out.readline()
        while line and not line.startswith("{"):  # printed by a library while it was imported
            line = out.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            words = [line for line in self._log.read().splitlines() if line.strip()]
            raise RuntimeError(f"{self.side.name} ended early: {words[-1] if words else 'it said nothing'}")
        found: dict[str, Any] = json.loads(line)
        return found

    def go(self) -> Lap | str:
        """One round, or why there will be none."""
        try:
            self.tell()
            found = self.hear()
        except (RuntimeError, BrokenPipeError) as error:
            self.end()
            return str(error)
        return Lap(**{"steps": None, **found})

    def tell(self) -> None:
        """Lets the side run."""
        into: IO[str] = self._process.stdin  # type: ignore[assignment]
        into.write("go\n")
        into.flush()

    def end(self) -> None:
        """Lets the side finish by itself, or ends it."""
        try:
            self._process.communicate(timeout=30)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.communicate()
        self._log.close()


def race(
    sides: Sequence[Side], shape: str, rounds: int, warm_up: int, threads: Mapping[str, int]
) -> tuple[dict[str, list[Lap]], list[str]]:
    """Runs a race to its end, see :func:`turns`.

    Returns:
        The rounds that count by side, and a sentence for every side that dropped out.
    """
    dropped: list[str] = []
    laps: dict[str, list[Lap]] = {}
    for turn in turns(sides, shape, rounds, warm_up, threads, dropped):
        for name, lap in turn.items():
            laps.setdefault(name, []).append(lap)
    return {name: found for name, found in laps.items() if len(found) == rounds}, dropped


def turns(
    sides: Sequence[Side], shape: str, rounds: int, warm_up: int, threads: Mapping[str, int], dropped: list[str]
) -> Iterator[dict[str, Lap]]:
    """Runs a race turn by turn.

    Args:
        sides: who takes part.
        shape: what they train.
        rounds: rounds that count.
        warm_up: rounds before.
        threads: of torch, by side.
        dropped: gets a sentence for every side that drops out.

    Yields:
        One round of every side that takes part, by name.
    """
    with tempfile.TemporaryDirectory() as folder:
        runners: list[_Runner] = []
        try:
            for side in sides:  # one after the other: starting all at once makes all slow
                runner = _Runner(side, shape, rounds + warm_up, threads[side.name], Path(folder))
                runners.append(runner)
                try:
                    runner.hear()
                except RuntimeError as error:
                    dropped.append(str(error))
                    runners.remove(runner)
                    runner.end()
            for index in range(rounds + warm_up):
                turn = {}
                for runner in list(runners):
                    lap = runner.go()
                    if isinstance(lap, Lap):
                        turn[runner.side.name] = lap
                    else:
                        dropped.append(lap)
                        runners.remove(runner)
                if index >= warm_up:
                    yield turn
        finally:
            for runner in runners:
                runner.end()
