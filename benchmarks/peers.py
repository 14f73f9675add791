# SPDX-License-Identifier: Apache-2.0
"""Rounds of fl_lightning beside those of other packages for federated learning, on the same data.

    python -m benchmarks.peers --envs DIR [--rounds 21] [--races one both ...] [--out DIR]

Makes an environment for each package under DIR, unless it is there, and says in one sentence which package cannot take
part and why. Every side is a program that runs one round at a time; within a race they take turns. The clients hold
tensors in memory, shuffle them anew for every epoch, and train by plain SGD.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path

import lightning as L
import torch

import fl_lightning as fl
from benchmarks._peers.environments import MISSING, PACKAGES, prepare, version
from benchmarks._peers.race import race as run
from benchmarks._peers.races import races
from benchmarks._peers.report import Row, rows, table
from benchmarks._rounds.shape import SEED, SHAPES

WARM_UP = 2


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path, required=True, help="folder of the environments, made if need be")
    parser.add_argument("--rounds", type=int, default=21, help="rounds of each side that count")
    parser.add_argument("--races", nargs="+", metavar="RACE", help="only these, by short name; default: all")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="W1")
    parser.add_argument("--packages", nargs="*", metavar="PACKAGE", help="only these packages; default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"), help="folder for the results")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, found {arguments.rounds}")
    known = [package.name for package in PACKAGES]
    if unknown := sorted(set(arguments.packages or ()) - set(known)):
        parser.error(f"--packages must be among {known}, found {unknown}")
    shape, envs = SHAPES[arguments.shape], arguments.envs.absolute()
    absent = list(MISSING.values())
    present = []
    for package in PACKAGES:
        if arguments.packages is not None and package.name not in arguments.packages:
            continue
        reason = prepare(envs, package)
        present.extend([package] if reason is None else [])
        absent.extend([] if reason is None else [reason])
    executor = "executor" in inspect.signature(fl.FederatedStrategy).parameters
    chosen = races(envs, tuple(present), executor)
    names = [race.name for race in chosen]
    if unknown := sorted(set(arguments.races or ()) - set(names)):
        parser.error(f"--races must be among {names}, found {unknown}")
    facts = {
        "date": datetime.date.today().isoformat(), "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(), "torch": torch.__version__, "lightning": L.__version__,
        "fl_lightning": fl.__version__, "seed": SEED, "shape": shape.what, "rounds": arguments.rounds,
        **{package.name: version(envs, package) for package in present},
    }  # fmt: skip
    text = ["# Rounds of other packages", "", *(f"- {name}: {value}" for name, value in facts.items())]
    text += [f"- left out: {reason}" for reason in absent]
    text += ["", "Medians with intervals that cover them with 95 %.", ""]
    print("\n".join(text), flush=True)
    results: list[Row] = []
    dropped: list[str] = []
    for race in chosen:
        if arguments.races and race.name not in arguments.races:
            continue
        laps, gone = run(race.sides, shape.name, arguments.rounds, WARM_UP, race.threads)
        found = rows(race, laps, shape)
        results += found
        dropped += gone
        part = "\n".join([table(race, found), *(f"\n{sentence}" for sentence in gone)]) + "\n"
        print(part, flush=True)
        text.append(part)
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = "peers" if shape.name == "W1" else f"peers-{shape.name}"
    written = {"environment": facts, "absent": absent, "dropped": dropped, "results": [asdict(row) for row in results]}
    (arguments.out / f"{name}.json").write_text(json.dumps(written, indent=1) + "\n")
    (arguments.out / f"{name}.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
