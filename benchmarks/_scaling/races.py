# SPDX-License-Identifier: Apache-2.0
"""Who runs against whom: each side on one process and on several, all in turns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from benchmarks._peers.race import Side
from benchmarks._rounds.shape import Shape
from benchmarks._scaling.bounds import all_reduce_bytes, column_bytes

OURS, BARE, PFL = "fl_lightning", "bare all_reduce loop", "pfl"
_MODULES = {OURS: "ours", BARE: "all_reduce", PFL: "pfl"}


@dataclass(frozen=True)
class Entry:
    """A side on some number of processes.

    Attributes:
        package: whose it is.
        ranks: processes.
        per_round: clients per round.
        side: its program.
    """

    package: str
    ranks: int
    per_round: int
    side: Side

    @property
    def least(self) -> int:
        """Clients that some process has to train, all of one size, one after the other."""
        return ceil(self.per_round / self.ranks)

    def bytes(self, parameters: int) -> float:
        """What one process has to send in a round."""
        if self.package == OURS:
            return column_bytes(self.per_round, parameters, self.ranks)
        return all_reduce_bytes(parameters, self.ranks)


@dataclass(frozen=True)
class ScalingRace:
    """Entries that take turns.

    Attributes:
        name: short name.
        what: in words.
        entries: who takes part.
    """

    name: str
    what: str
    entries: tuple[Entry, ...]


def races(shape: Shape, ranks: Sequence[int], device: str, pfl: str | None) -> list[ScalingRace]:
    """All races of a shape.

    Args:
        shape: what is trained.
        ranks: numbers of processes, ascending; the first is 1.
        device: ``"cpu"`` or ``"cuda"``.
        pfl: the interpreter of pfl's environment; ``None`` without it.
    """

    def entry(package: str, number: int, per_round: int, *more: str) -> Entry:
        python = pfl if package == PFL and pfl is not None else sys.executable
        run = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}") if number > 1 else ()
        given = ("--clients", str(shape.clients), "--per-round", str(per_round), "--device", device, *more)
        program = (python, *run, "-m", f"benchmarks._peers.side_{_MODULES[package]}", *given)
        return Entry(package, number, per_round, Side(f"{package} on {number}", program, package))

    def race(name: str, what: str, packages: Sequence[str], weak: bool, *more: str) -> ScalingRace:
        size = shape.per_round
        words = f"{size} clients per round and process" if weak else f"{size} clients per round"
        entries = [
            entry(package, number, size * number if weak else size, *(more if package == OURS else ()))
            for package in packages
            for number in ranks
        ]
        return ScalingRace(name, f"{what}, {words}", tuple(entries))

    everyone = [OURS, BARE] + ([] if pfl is None else [PFL])
    return [
        race("fedavg", "FedAvg", everyone, False),
        race("fedlf", "FedLF", [OURS], False, "--method", "fedlf"),
        race("evaluated", "FedAvg, all clients evaluated after every round", [OURS], False, "--evaluate"),
        race("uneven", "FedAvg, clients that differ in size", [OURS], False, "--uneven"),
        race("fedavg-weak", "FedAvg", everyone, True),
        race("fedlf-weak", "FedLF", [OURS], True, "--method", "fedlf"),
    ]
