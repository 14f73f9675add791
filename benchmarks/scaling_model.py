# SPDX-License-Identifier: Apache-2.0
"""Rounds on 8 to 256 GPUs, on paper: a simulation from measured, stated and assumed rates.

    python -m benchmarks.scaling_model [--gpus 8 16 32 64 128 256] [--clients 100 1000] [--models ResNet-18 ...]
                                       [--set network=1.1e10 ...] [--measure] [--alpha 0.1] [--no-overlap]
                                       [--out FILE]

Prints every rate with where it is from, then a table per model and number of clients. Clients differ in size like
label-skewed Dirichlet partitions; ten times as many are registered as take part in a round. Each line is the mean of
some rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean, mode

import numpy as np
import torch

from benchmarks._scaling.measured import solve_time
from benchmarks._scaling.model import Round, client_sizes, simulate
from benchmarks._scaling.rates import WORKLOADS, Rates, Workload

REGISTERED = 10
"""Clients registered per client of a round."""

_HEAD = (
    "| GPUs | s/round | training | all busy | largest client | columns late | sums | solve | rest of the step "
    "| by adding up only | GB sent by a GPU | GB in a GPU | bound by |\n" + "|---" * 13 + "|"
)
_NOTES = """\
One round of FedLF, one direction per layer, no remembered updates. Seconds: *training* until the last client is done;
*all busy*, what it would take if no GPU waited; *largest client* alone; *columns late*, from the last client until all
columns have arrived; *sums*, the exchange of the layers' Gram matrices; *solve*, the layers' small problems, which
every GPU solves. *By adding up only*: by a round in which an all_reduce adds up the updates. *Bound by*: the longest of
training, network (late columns, sums, weights) and server (products, solve, step); the largest client where it takes
more than 90 % of training; memory where a GPU has too little, and times are then those of a larger one.
"""


@dataclass(frozen=True)
class Line:
    """Some rounds on some number of GPUs.

    Attributes:
        gpus: how many.
        rounds: what was simulated.
    """

    gpus: int
    rounds: tuple[Round, ...]

    def mean(self, name: str) -> float:
        """Of an attribute of the rounds."""
        return fmean(getattr(one, name) for one in self.rounds)

    @property
    def bound(self) -> str:
        """What bounds most of the rounds."""
        return mode(one.bound for one in self.rounds)

    def text(self) -> str:
        """The line of the table."""
        times = ("seconds", "training", "ideal", "largest", "late", "sums", "solve")
        rest = self.mean("server") - self.mean("sums") - self.mean("solve")
        cells = [
            str(self.gpus), *(_short(self.mean(name)) for name in times), _short(rest),
            f"{self.mean('seconds') / self.mean('adding'):.2f}", _short(self.mean("sent") / 1e9),
            _short(self.mean("memory") / 1e9), self.bound,
        ]  # fmt: skip
        return "| " + " | ".join(cells) + " |"


def _short(number: float) -> str:
    if 0 < number < 0.001:
        return "< 0.001"
    return f"{number:.0f}" if number >= 100 else f"{number:.2g}"


def lines(
    work: Workload,
    rates: Rates,
    clients: int,
    gpus: Sequence[int],
    rounds: int,
    alpha: float,
    overlap: bool = True,
) -> list[Line]:
    """Simulates a model and a number of clients; all numbers of GPUs see the same rounds."""
    sizes = []
    for seed in range(rounds):
        registered = client_sizes(REGISTERED * clients, work.samples, alpha, seed)
        sizes.append(np.random.default_rng(seed).choice(registered, clients, replace=False).tolist())
    return [Line(r, tuple(simulate(work, rates, size, r, overlap) for size in sizes)) for r in gpus]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [work.name for work in WORKLOADS]
    parser.add_argument("--gpus", nargs="+", type=int, default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 1000], help="clients per round")
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--set", nargs="+", default=[], metavar="RATE=VALUE", help="other rates, by name")
    parser.add_argument("--measure", action="store_true", help="measure the rates solve_100 and solve_1000 here")
    parser.add_argument("--alpha", type=float, default=0.1, help="of the Dirichlet distribution of labels")
    parser.add_argument("--rounds", type=int, default=10, help="simulated rounds per line")
    parser.add_argument("--no-overlap", action="store_true", help="send columns when all clients are trained")
    parser.add_argument("--out", type=Path, help="file for the tables, too")
    arguments = parser.parse_args()
    for name in ("gpus", "clients", "alpha", "rounds"):
        given = getattr(arguments, name)
        if not min(given if isinstance(given, list) else [given]) > 0:
            parser.error(f"--{name} must be above 0, found {given}")
    try:
        changed = {name: float(value) for name, _, value in (s.partition("=") for s in arguments.set)}
        if arguments.measure:
            torch.set_num_threads(1)
            changed = {"solve_100": solve_time(100), "solve_1000": solve_time(1000)} | changed
        rates = Rates().changed(changed)
    except ValueError as error:
        parser.error(f"--set: {error}")
    text = ["# Rounds on many GPUs, simulated", "", "Nothing here was run on GPUs.", "", _NOTES]
    text += ["| rate | value | from |", "|---|---|---|"]
    for rate in fields(rates):
        source = "--set or --measure" if rate.name in changed else rate.metadata["source"]
        text.append(f"| {rate.name} | {getattr(rates, rate.name):.3g} {rate.metadata['unit']} | {source} |")
    for work in WORKLOADS:
        if work.name in arguments.models:
            text.append(f"| {work.name}: work per sample | {work.work:.3g} FLOP at {work.rate:.3g}/s | {work.source} |")
    for work in WORKLOADS:
        for clients in arguments.clients if work.name in arguments.models else ():
            found = lines(
                work, rates, clients, sorted(arguments.gpus), arguments.rounds, arguments.alpha,
                not arguments.no_overlap,
            )  # fmt: skip
            whole = clients * work.parameters * rates.bytes_per_number / 1e9
            text += ["", f"### {work.name}, {clients} clients per round", ""]
            text += [f"All updates of a round take {whole:,.3g} GB.", "", _HEAD]
            text += [line.text() for line in found]
    print("\n".join(text))
    if arguments.out is not None:
        arguments.out.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
