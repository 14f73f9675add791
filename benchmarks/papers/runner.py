# SPDX-License-Identifier: Apache-2.0
"""Runs jobs side by side, one process and one thread each, and says how long the rest will take."""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks._kernels.memory import keep_freed_memory
from benchmarks.papers.experiment import Case, Experiment, Job, Log
from benchmarks.papers.records import claim, reached, recorded
from fl_lightning.lightning.versions import versions

SAY_EVERY = 30.0  # seconds between two lines about a run


def origin() -> dict[str, str]:
    """Versions and commit."""
    try:
        commit = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "commit": commit,
        **{name: versions()[name].split(" ")[0] for name in ("fl_lightning", "torch", "lightning", "python")},
    }


@dataclass
class Progress:
    """A job, what it is thought to cost, and how far it is."""

    job: Job
    case: Case
    cost: float
    first: int = 0
    done: int = 0
    began: float = 0.0
    spoke: float = 0.0
    over: bool = False

    def left(self, pace: float) -> float:
        """Seconds that it will still take; ``pace`` is how much slower than estimated the other runs are."""
        if self.over:
            return 0.0
        if self.done > self.first:
            return (time.monotonic() - self.began) / (self.done - self.first) * (self.job.rounds - self.done)
        return self.cost * pace


def plan(
    experiment: Experiment,
    root: Path,
    out: Path,
    seeds: Sequence[int] | None,
    rounds: int | None,
    only: Sequence[str],
    accelerator: str,
) -> list[Progress]:
    """The runs that are asked for and not complete yet, with their costs.

    Raises:
        MissingDataError: their data is not there.
    """
    found, known = [], origin()
    records = recorded(out, experiment.name)
    cases = [case for case in experiment.cases if any(text in case.name for text in only)]
    chosen = {case.name: case.seeds if seeds is None else tuple(seeds) for case in cases}
    for place in range(max(map(len, chosen.values()), default=0)):  # every case once before a second seed
        for case in cases:
            if place >= len(chosen[case.name]):
                continue
            target = case.rounds if rounds is None else min(rounds, case.rounds)
            seed = chosen[case.name][place]
            job = Job(experiment.name, case.name, seed, target, root, out, accelerator, known)
            done = reached(records.get(job.run, []))
            if done >= target:
                continue
            case.check(root)
            started = done if job.checkpoint.is_file() else 0
            found.append(Progress(job, case, case.cost(target) * (1 - started / target), started, started))
    return found


def clock(seconds: float) -> str:
    """Hours and minutes, or minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 3600} h {whole % 3600 // 60:02} min" if whole >= 3600 else f"{whole // 60}:{whole % 60:02} min"


def serve(inbox: Any, messages: Any) -> None:
    """The life of a process: one run after the other, until there is none."""
    torch.set_num_threads(1)
    keep_freed_memory()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for case, job in iter(inbox.get, None):
        work(case, job, messages)


def work(case: Case, job: Job, messages: Any) -> None:
    """One run, unless another process is at it or completed it since the plan was made."""
    began = time.monotonic()
    try:
        with claim(job.lock) as mine:
            if not mine:
                said = "left to another process, which is at it"
            elif reached(job.recorded()) >= job.rounds:
                said = "completed by another process"
            else:
                case.execute(job, Log(job, lambda done: messages.put((job.name, done, ""))))
                said = f"{job.rounds} rounds in {clock(time.monotonic() - began)}"
        messages.put((job.name, job.rounds, said))
    except Exception:
        messages.put((job.name, -1, traceback.format_exc()))


class WorkerProcess:
    """A process, and the run that it is at."""

    def __init__(self, messages: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.inbox: Any = context.Queue()
        self.process = context.Process(target=serve, args=(self.inbox, messages), daemon=True)
        self.process.start()
        self.run: Progress | None = None

    def take(self, run: Progress) -> None:
        """Begins a run."""
        self.run = run
        run.spoke = time.monotonic()
        self.inbox.put((run.case, run.job))


@dataclass
class Pool:
    """Keeps ``jobs`` processes at work.

    Attributes:
        runs: what to do, in this order.
        jobs: processes at a time.
    """

    runs: list[Progress]
    jobs: int
    failed: list[str] = field(default_factory=list)

    def work(self) -> list[str]:
        """Runs everything; names of the runs that failed."""
        os.environ["OMP_NUM_THREADS"] = "1"
        messages: Any = multiprocessing.get_context("spawn").Queue()
        by_name = {run.job.name: run for run in self.runs}
        waiting = list(self.runs)
        workers: list[WorkerProcess] = [WorkerProcess(messages) for _ in range(min(self.jobs, len(waiting)))]
        while waiting or any(worker.run for worker in workers):
            for worker in workers:
                if worker.run is not None and worker.run.over:
                    worker.run = None
                if worker.run is None and waiting:
                    worker.take(waiting.pop(0))
            try:
                self._hear(by_name, *messages.get(timeout=1.0))
            except queue.Empty:
                for place, worker in enumerate(workers):
                    if not worker.process.is_alive() and messages.empty():
                        if worker.run is not None and not worker.run.over:
                            said = f"its process ended with status {worker.process.exitcode}"
                            self._hear(by_name, worker.run.job.name, -1, said)
                        workers[place] = WorkerProcess(messages)
        for worker in workers:
            worker.inbox.put(None)
            worker.process.join()
        return self.failed

    def _hear(self, by_name: Mapping[str, Progress], name: str, done: int, said: str) -> None:
        run = by_name[name]
        if done < 0:
            run.over = True
            self.failed.append(run.job.name)
            sys.stderr.write(f"{run.job.name} failed: {said}\n")
        elif said:
            run.over = True
            self._say(f"{run.job.name}: {said}")
        else:
            if not run.began:
                run.began, run.first = time.monotonic(), done  # without the time to start
            run.done = done
            if time.monotonic() - run.spoke > SAY_EVERY:
                run.spoke = time.monotonic()
                self._say(f"{run.job.name}: round {done} of {run.job.rounds}, {clock(run.left(1.0))} left")

    def _say(self, text: str) -> None:
        over = sum(run.over for run in self.runs)
        known = [run for run in self.runs if not run.over and run.done > run.first]
        pace = self._pace(known)
        rest = sum(run.left(pace) for run in self.runs) / self.jobs
        print(f"[{over}/{len(self.runs)} runs, about {clock(rest)} left] {text}", flush=True)

    @staticmethod
    def _pace(known: Iterable[Progress]) -> float:
        pairs = [((time.monotonic() - run.began) / (run.done - run.first), run.cost / run.job.rounds) for run in known]
        expected = sum(cost for _, cost in pairs)
        return sum(seen for seen, _ in pairs) / expected if expected > 0 else 1.0
