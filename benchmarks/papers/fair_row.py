# SPDX-License-Identifier: Apache-2.0
"""What leaving out FedLF's fair-driven row where it is not needed gains and costs, on Fashion-MNIST.

    python -m benchmarks.papers.fair_row --data-root DIR [--rounds 50] [--seeds 3] [--partitions IID ...]

In every round 10 of 100 clients train the MLP for one epoch in batches of 50 with learning rate 0.1. Clients have data
of all classes (IID), of one (Pat-1) or two (Pat-2), or in shares of a Dirichlet distribution (Dir). Every client is
tested on its own part of the test data, every 5 rounds. The figures are means over the last 5 of these tests. Conflicts
are clients, added up over all rounds, in the model and in blocks of layers.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import lightning as L
import torch
from torch.utils.data import TensorDataset

import fl_lightning as fl
from benchmarks.papers.architectures import MLP
from benchmarks.papers.conflicts import CLIENTS, ONLINE, Counted, load
from fl_lightning.algorithms import FedAvg, FedLF, ServerRule
from fl_lightning.data import IID, Dirichlet, Partition, Pathological

BATCH, LR, EVERY, LAST = 50, 0.1, 5, 5

PARTITIONS: dict[str, Partition] = {
    "IID": IID(CLIENTS),
    "Pat-1": Pathological(CLIENTS, 1),
    "Pat-2": Pathological(CLIENTS, 2),
    "Dir(1)": Dirichlet(CLIENTS, 1.0),
}
RULES: dict[str, Callable[[], ServerRule]] = {
    "FedAvg": FedAvg,
    "FedLF": FedLF,
    'FedLF(fair_row="needed")': partial(FedLF, fair_row="needed"),
}


@dataclass(frozen=True)
class Result:
    """One fit. ``curve`` has the mean accuracy at every test; ``fair`` the mean share of layers with the row."""

    partition: str
    rule: str
    seed: int
    curve: list[float]
    mean: float
    worst: float
    angle: float
    fair: float
    conflicts: int


class Curve(L.Callback):
    """Gathers what validations log about clients, and the shares of layers with a fair row."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float]] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Takes a validation."""
        if not trainer.sanity_checking:
            found = trainer.callback_metrics
            mean, worst, angle = (float(found[f"fed/val_acc/{name}"]) for name in ("mean", "worst_10", "angle"))
            self.rows.append((mean, worst, angle))


class Noted(Counted):
    """Also notes the shares of layers that had the fair row."""

    def __init__(self, rule: ServerRule) -> None:
        super().__init__(rule)
        self.shares: list[float] = []

    def aggregate(self, cohort: fl.Cohort) -> torch.Tensor:
        """The rule's step."""
        step = super().aggregate(cohort)
        self.shares.append(self.report.scalars.get("fair_layers", float(isinstance(self.rule, FedLF))))
        return step


def run(partition: str, rule: str, train: TensorDataset, test: TensorDataset, rounds: int, seed: int) -> Result:
    """Trains for some rounds."""
    L.seed_everything(seed, verbose=False)
    noted, curve = Noted(RULES[rule]()), Curve()
    data = fl.FederatedDataModule(
        train, PARTITIONS[partition], val=test, batch_size=BATCH, eval_batch_size=1000, seed=seed
    )
    module = fl.ClientModule(MLP(), optimizer=partial(torch.optim.SGD, lr=LR), num_classes=10)
    trainer = L.Trainer(
        max_epochs=rounds,
        strategy=fl.FederatedStrategy(noted, clients_per_round=ONLINE, seed=seed),
        accelerator="cpu",
        callbacks=[curve],
        check_val_every_n_epoch=EVERY,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    mean, worst, angle = (fmean(values) for values in zip(*curve.rows[-LAST:], strict=True))
    conflicts = sum(count.model + sum(count.blocks) for count in noted.counts)
    means = [row[0] for row in curve.rows]
    return Result(partition, rule, seed, means, mean, worst, angle, fmean(noted.shares), conflicts)


def main() -> None:
    """Prints a Markdown table of means over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="folder that holds FashionMNIST/raw")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind, with seeds from 0")
    parser.add_argument("--partitions", nargs="+", choices=PARTITIONS, default=list(PARTITIONS))
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    train, test = (load(arguments.data_root, split) for split in (True, False))
    shown = [5, 10, 15]
    early = " | ".join(f"{at} rounds" for at in shown)
    print(f"| partition | rule | {early} | mean | worst 10 % | angle | layers with the row | conflicts |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    results: list[Result] = []
    for partition in arguments.partitions:
        for rule in RULES:
            found = [run(partition, rule, train, test, arguments.rounds, seed) for seed in range(arguments.seeds)]
            results += found
            figures = [fmean(r.curve[at // EVERY - 1] for r in found) for at in shown]
            figures += [fmean(values) for values in zip(*((r.mean, r.worst, r.angle) for r in found), strict=True)]
            share = f"{fmean(r.fair for r in found):.0%}"
            cells = [partition, rule, *(f"{figure:.3f}" for figure in figures), share]
            print(f"| {' | '.join(cells)} | {sum(r.conflicts for r in found)} |", flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
