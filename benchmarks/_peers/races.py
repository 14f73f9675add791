# SPDX-License-Identifier: Apache-2.0
"""Who runs against whom."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks._peers.environments import PACKAGES, Package, python_of
from benchmarks._peers.race import Side

OURS, HAND_WRITTEN = "fl_lightning", "hand-written loop"
CORES = 2


@dataclass(frozen=True)
class Race:
    """Sides that take turns.

    Attributes:
        name: short name.
        what: in words.
        method: ``"fedavg"`` or ``"fedfv"``.
        sides: who takes part.
        threads: of torch, by side.
    """

    name: str
    what: str
    method: str
    sides: tuple[Side, ...]
    threads: dict[str, int]


def races(folder: Path, present: tuple[Package, ...], executor: bool) -> list[Race]:
    """All races that the installed packages allow.

    Args:
        folder: where the environments are.
        present: the packages that take part.
        executor: whether ours can train two clients at a time.
    """
    names = {package.name for package in present}
    pythons = {package.name: str(python_of(folder, package)) for package in PACKAGES}

    def side(label: str, package: str, *arguments: str, launcher: tuple[str, ...] = (), module: str = "") -> Side:
        own = {OURS: "ours", HAND_WRITTEN: "hand_written", "a Trainer per client": "trainers"}
        module = module or own.get(package, package)
        python = pythons.get(package, sys.executable)
        return Side(label, (python, *launcher, "-m", f"benchmarks._peers.side_{module}", *arguments), package)

    def race(name: str, what: str, method: str, *sides: tuple[Side, int]) -> Race:
        chosen = [(one, threads) for one, threads in sides if one.package in names or one.package not in pythons]
        return Race(name, what, method, tuple(one for one, _ in chosen), {one.name: n for one, n in chosen})

    trainers = "a Trainer per client"
    loop, ours = side(HAND_WRITTEN, HAND_WRITTEN), side(OURS, OURS)
    halves = side(f"{HAND_WRITTEN}, two processes", HAND_WRITTEN, "--workers", "2")
    both = side(f"{OURS}, two clients at a time", OURS, "--workers", "2") if executor else ours
    threads = 1 if executor else CORES
    fv = ("--method", "fedfv")
    ours_fv = side(OURS, OURS, *fv)
    both_fv = side(f"{OURS}, two clients at a time", OURS, "--workers", "2", *fv) if executor else ours_fv
    run = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={CORES}")
    found = [
        race(
            "one", "one thread", "fedavg",
            (loop, 1), (ours, 1), (side("pfl", "pfl"), 1), (side("FLGo", "flgo"), 1), (side("FedLab", "fedlab"), 1),
            (side("BlazeFL", "blazefl"), 1),
            (side(f"{HAND_WRITTEN}, BlazeFL's Python", "blazefl", module="hand_written"), 1),
            (side(trainers, trainers), 1),
        ),
        race("one-flower", "one thread, Flower", "fedavg", (loop, 1), (ours, 1), (side("Flower", "flwr"), 1)),
        race(
            "both", "both cores", "fedavg",
            (halves, 1), (both, threads), (side("pfl, two threads", "pfl"), 2),
            (side("pfl, two processes", "pfl", "--workers", "2", launcher=run), 1),
            (side("FLGo, two threads", "flgo"), 2), (side("FLGo, two clients at a time", "flgo", "--workers", "2"), 1),
            (side("FedLab, two threads", "fedlab"), 2),
            (side("BlazeFL, two clients at a time in threads", "blazefl", "--workers", "2"), 1),
            (side("BlazeFL, two processes", "blazefl", "--workers", "2", "--processes"), 1),
            (side(f"{trainers}, two threads", trainers), 2),
        ),
        race(
            "both-flower", "both cores, Flower", "fedavg",
            (both, threads), (side("Flower, two workers", "flwr", "--workers", "2"), 1),
        ),
        race("fedfv-one", "FedFV, one thread", "fedfv", (ours_fv, 1), (side("FLGo", "flgo", *fv), 1)),
        race(
            "fedfv-both", "FedFV, both cores", "fedfv",
            (both_fv, threads), (side("FLGo, two threads", "flgo", *fv), 2),
            (side("FLGo, two clients at a time", "flgo", "--workers", "2", *fv), 1),
        ),
    ]  # fmt: skip
    return [one for one in found if len({side.package for side in one.sides} - {HAND_WRITTEN}) > 1]
