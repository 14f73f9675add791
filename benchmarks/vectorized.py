# SPDX-License-Identifier: Apache-2.0
"""Rounds whose clients train in one pass, beside rounds in which they train one after the other.

    python -m benchmarks.vectorized [--pairs 15] [--rounds 4] [--cases 0 1 2] [--accelerator cpu] [--out DIR]

A pair is two short fits of the same project from the same weights, one with each executor, one right after the other on
one thread; it gives the ratio of their median rounds in processor time (on the wall with ``--accelerator gpu``), the
first round left out. Whole rounds count: loops, callbacks, logging and the server step. The weights that both fits end
with are compared.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import platform
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fl_lightning as fl
from benchmarks._rounds.timing import Median, Turns

CLASSES, SEED = 10, 0
_SGD = partial(torch.optim.SGD, lr=0.05)


@dataclass(frozen=True)
class Case:
    """One project; every client takes part in every round.

    Attributes:
        name: for the table.
        net: makes the network.
        features: numbers per sample.
        clients: clients.
        samples: samples per client; unequal clients have this many on average.
        batch: samples per batch.
        logs: ``self.log`` once per step.
        unequal: sizes from a tenth to twice the mean.
        optimizer: the clients' optimizer.
    """

    name: str
    net: Callable[[], nn.Module]
    features: int
    clients: int
    samples: int
    batch: int
    logs: bool = False
    unequal: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] = _SGD

    def data(self) -> fl.FederatedDataModule:
        """Gaussian inputs and random labels, divided in order."""
        generator = torch.Generator().manual_seed(SEED)
        sizes = [self.samples] * self.clients
        if self.unequal:
            shares = torch.rand(self.clients, generator=generator) * 1.9 + 0.1
            sizes = (shares * self.samples / shares.mean()).long().tolist()
        x = torch.randn(sum(sizes), self.features, generator=generator)
        y = torch.randint(0, CLASSES, (sum(sizes),), generator=generator)
        parts = list(torch.arange(sum(sizes)).split(sizes))
        return fl.FederatedDataModule(TensorDataset(x, y), parts, batch_size=self.batch)


_SMALL, _LARGE = partial(nn.Linear, 60, CLASSES), partial(nn.Linear, 784, CLASSES)
CASES = (
    Case("logistic regression 60-10, 100 x 600, batch 10", _SMALL, 60, 100, 600, 10),
    Case("the same, one self.log per step", _SMALL, 60, 100, 600, 10, logs=True),
    Case("the same, clients of unequal sizes", _SMALL, 60, 100, 600, 10, unequal=True),
    Case("the same, Adam", _SMALL, 60, 100, 600, 10, optimizer=partial(torch.optim.Adam, lr=0.001)),
    Case("logistic regression 784-10, 100 x 600, batch 10", _LARGE, 784, 100, 600, 10),
    Case("logistic regression 784-10, 100 x 600, batch 50", _LARGE, 784, 100, 600, 50),
    Case("MLP 784-200-200-10, 10 x 600, batch 50 (W1)", fl.models.MLP, 784, 10, 600, 50),
)


class Project(L.LightningModule):
    """A network as a Lightning project has it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net, self.case = case.net(), case

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy; logged once per step if asked for."""
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        if self.case.logs:
            self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The case's optimizer."""
        return self.case.optimizer(self.parameters())


@dataclass(frozen=True)
class Fit:
    """What one fit gave: seconds of its median round, and the weights."""

    cpu: float
    wall: float
    weights: Tensor


def fit(case: Case, data: fl.FederatedDataModule, executor: fl.executors.Executor, rounds: int, where: str) -> Fit:
    """Runs a short fit.

    Raises:
        RuntimeError: the clients did not train as the executor is meant to.
    """
    torch.manual_seed(SEED)
    module, timer = Project(case), Turns(lambda: None, warm_up=1)
    strategy = fl.FederatedStrategy(clients_per_round=case.clients, executor=executor, seed=SEED)
    trainer = L.Trainer(
        max_epochs=rounds + 1, strategy=strategy, accelerator=where, callbacks=[timer], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    if strategy.detour is not None:
        raise RuntimeError(f"{case.name}: {strategy.detour}")
    times = timer.ours
    weights = torch.cat([p.detach().flatten().cpu() for p in module.parameters()])
    return Fit(statistics.median(t.cpu for t in times), statistics.median(t.wall for t in times), weights)


@dataclass(frozen=True)
class Result:
    """How many times as fast clients are together, over pairs of fits; rounds in milliseconds."""

    case: str
    gain: Median
    sequential_ms: float
    vectorized_ms: float
    difference: float
    change: float


def measure(case: Case, pairs: int, rounds: int, where: str, at_once: int | None) -> Result:
    """Runs the pairs of one case, in turns which of the two comes first."""
    data = case.data()
    executors = [fl.executors.Sequential(), fl.executors.Vectorized(clients_at_once=at_once)]
    gains, found = [], []
    for pair in range(pairs):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        fits = {place: fit(case, data, executors[place], rounds, where) for place in order}
        alone, together = fits[0], fits[1]
        gains.append(alone.cpu / together.cpu if where == "cpu" else alone.wall / together.wall)
        found.append((alone, together))
    torch.manual_seed(SEED)
    start = torch.cat([p.detach().flatten() for p in Project(case).parameters()])
    alone, together = found[-1]
    times = [[one.cpu if where == "cpu" else one.wall for one in side] for side in zip(*found, strict=True)]
    return Result(
        case.name,
        Median.of(gains),
        1e3 * statistics.median(times[0]),
        1e3 * statistics.median(times[1]),
        float((alone.weights - together.weights).abs().max()),
        float((alone.weights - start).abs().max()),
    )


def main() -> None:
    """Prints a Markdown table and writes it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of fits per case")
    parser.add_argument("--rounds", type=int, default=4, help="rounds per fit that count")
    parser.add_argument(
        "--cases", nargs="+", type=int, choices=range(len(CASES)), default=list(range(len(CASES))), metavar="CASE",
        help="; ".join(f"{number}: {case.name}" for number, case in enumerate(CASES)),
    )  # fmt: skip
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--at-once", type=int, help="clients per pass; default: the executor's choice")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"), help="folder for the results")
    parser.add_argument("--name", default="vectorized", help="name of the results")
    arguments = parser.parse_args()
    if arguments.pairs < 1 or arguments.rounds < 1:
        parser.error(f"--pairs and --rounds must be positive, found {arguments.pairs} and {arguments.rounds}")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {arguments.accelerator}",
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, lightning {L.__version__}",
        "runs": f"{arguments.pairs} pairs of fits of {arguments.rounds} rounds, one thread, seed {SEED}",
    }
    lines = ["# Vectorized clients", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["Gain: sequential time over vectorized time, median with an interval that covers it with 95 %.", ""]
    lines += [
        "| case | gain | sequential, ms/round | vectorized, ms/round | largest difference of weights | their change |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    results = []
    for case in (CASES[number] for number in arguments.cases):
        r = measure(case, arguments.pairs, arguments.rounds, arguments.accelerator, arguments.at_once)
        results.append(r)
        lines.append(
            f"| {r.case} | {r.gain.text(2)} | {r.sequential_ms:.0f} | {r.vectorized_ms:.0f} "
            f"| {r.difference:.1e} | {r.change:.1e} |"
        )
        print(lines[-1], flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    written = {"environment": facts, "results": [asdict(result) for result in results]}
    (arguments.out / f"{arguments.name}.json").write_text(json.dumps(written, indent=1) + "\n")
    (arguments.out / f"{arguments.name}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
