# SPDX-License-Identifier: Apache-2.0
"""Rounds on several processes beside rounds on one, and beside other ways to do so.

    python -m benchmarks.scaling [--envs DIR] [--shapes W1 W2] [--ranks 1 2] [--device cpu|cuda] [--rounds 11]
                                 [--races fedavg ...] [--clients N] [--out DIR] [--name NAME]

Every side runs on one process and on several, started by torchrun with one thread each. All take turns, round by round,
so that a turn gives ratios. Strong races keep the clients of a round, weak ones those of a round and process. Beside
ours run the hand-written loop with one all_reduce, and pfl's own distributed simulation, which needs ``--envs`` (see
``python -m benchmarks.peers``). Turns are written as they end. A run that was killed goes on with the next one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch

import fl_lightning as fl
from benchmarks._peers.environments import PACKAGES, prepare, python_of, version
from benchmarks._peers.race import turns
from benchmarks._rounds.shape import SEED, SHAPES, Shape
from benchmarks._scaling.races import ScalingRace, races
from benchmarks._scaling.records import Records
from benchmarks._scaling.report import Row, rows, tables

WARM_UP = 1
_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
_NOTES = """\
*By one process*: time of a round by that of the same side on one process in the same turn. *Least possible*: what the
division of clients allows, ceil(m / R) of m equal ones. *Rest*: Lightning's loops, sampling, logging. *Exchange*
includes the wait for the process that is done last; the least over processes is what remains without it. *Formula*:
bytes that a process has to send in a round, (m / R + 1) n 4 (R - 1) / R in column slices for ours and
2 n 4 (R - 1) / R for an all_reduce. Bytes are counted in every call of torch.distributed. Medians with intervals that
cover them with 95 %.
"""


def _settings(device: str, ranks: list[int], pfl: str, clients: int | None) -> dict[str, Any]:
    """Under which rounds are comparable."""
    gpu = f", {torch.cuda.get_device_name()}" if device == "cuda" else ""
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}{gpu}", "python": platform.python_version(),
        "torch": torch.__version__, "lightning": L.__version__, "fl_lightning": fl.__version__, "seed": SEED,
        "backend": "nccl" if device == "cuda" else "gloo", "processes": ranks, "threads": 1, "pfl": pfl,
        "variables": " ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ) or "none",
        "clients": clients or "the shapes'",
    }  # fmt: skip


def measure(race: ScalingRace, shape: Shape, rounds: int, records: Records) -> list[Row]:
    """Runs what is missing of a race, and writes each turn down when it is over."""
    done = len(records.turns.get((shape.name, race.name), ()))
    if rounds > done:
        dropped: list[str] = []
        sides = [entry.side for entry in race.entries]
        threads = {side.name: 1 for side in sides}
        for turn in turns(sides, shape.name, rounds - done, WARM_UP, threads, dropped):
            records.add(shape.name, race.name, turn)
        for sentence in dropped:
            records.drop(sentence)
    return rows(race, records.turns.get((shape.name, race.name), ()), shape)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path, help="folder of the environments; without it, pfl is left out")
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["W1", "W2"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="numbers of processes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU per process")
    parser.add_argument("--rounds", type=int, default=11, help="rounds of each side that count")
    parser.add_argument("--races", nargs="+", metavar="RACE", help="only these, by short name; default: all")
    parser.add_argument("--clients", type=int, help="registered clients, if memory is short; no difference otherwise")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"), help="folder for the results")
    parser.add_argument("--name", default="scaling", help="name of the results")
    arguments = parser.parse_args()
    ranks = sorted({1, *arguments.ranks})
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, found {arguments.rounds}")
    if ranks[0] < 1:
        parser.error(f"--ranks must be at least 1, found {ranks[0]}")
    if arguments.device == "cuda" and ranks[-1] > torch.cuda.device_count():
        parser.error(f"--ranks must be at most the {torch.cuda.device_count()} GPUs here, found {ranks[-1]}")
    left_out, pfl = "--envs was not given", None
    if arguments.envs is not None:
        package = next(package for package in PACKAGES if package.name == "pfl")
        envs = arguments.envs.absolute()
        left_out = prepare(envs, package) or ""
        pfl = None if left_out else str(python_of(envs, package))
    if arguments.device == "cpu":
        os.environ["PFL_PYTORCH_DEVICE"] = "cpu"  # pfl takes the GPU where there is one
    shapes = [SHAPES[name] for name in arguments.shapes]
    chosen: list[tuple[Shape, ScalingRace]] = []
    for shape in (replace(shape, clients=arguments.clients or shape.clients) for shape in shapes):
        known = races(shape, ranks, arguments.device, pfl)
        if unknown := sorted(set(arguments.races or ()) - {race.name for race in known}):
            parser.error(f"--races must be among {[race.name for race in known]}, found {unknown}")
        chosen += [(shape, race) for race in known if race.name in (arguments.races or (race.name,))]
    released = f"left out: {left_out}" if pfl is None else version(envs, package)
    settings = _settings(arguments.device, ranks, released, arguments.clients)
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        records = Records(arguments.out / f"{arguments.name}.jsonl", settings)
    except ValueError as error:
        parser.error(str(error))
    facts = {"date": datetime.date.today().isoformat(), **settings, "rounds": arguments.rounds}
    facts |= {shape.name: shape.what for shape in shapes}
    text = ["# Rounds on several processes", "", *(f"- {name}: {value}" for name, value in facts.items())]
    print("\n".join([*text, "", _NOTES]), flush=True)
    parts: list[str] = []
    results: list[Row] = []
    for shape, race in chosen:
        found = measure(race, shape, arguments.rounds, records)
        if found:
            results += found
            parts.append(tables(race, found))
            print(parts[-1], flush=True)
    text += [f"- dropped out: {sentence}" for sentence in records.dropped]
    (arguments.out / f"{arguments.name}.md").write_text("\n".join([*text, "", _NOTES, *parts]))
    written = {"environment": facts, "dropped": records.dropped, "results": [asdict(row) for row in results]}
    (arguments.out / f"{arguments.name}.json").write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
