# SPDX-License-Identifier: Apache-2.0
"""Whom do the steps of FedLF and FedMDFG work against? After FedLF (AAAI 2024), Table 2, on Fashion-MNIST.

    python -m benchmarks.papers.conflicts --data-root DIR [--rounds 100] [--seeds 1] [--lr 0.1] [--json FILE]

In every round 10 of 100 clients, who have one class each (Pat-1) or two (Pat-2), train the MLP for one epoch in batches
of 200. A client conflicts with the step if the inner product of its update and the step is negative: in the model, or
in a block, which is a layer or several that FedLF solved together. The counts are taken from the vectors in float64,
not from the Gram matrices that the rules work on.

FedLF has to show no conflict in the model and in any block, and may merge layers or fall back in at most 2 % of the
rounds. FedMDFG, which knows no layers, has to show none in the model. The exit status is 1 if that does not hold.
FedAvg stands beside them for comparison.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import fmean

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from torchvision.datasets import FashionMNIST

import fl_lightning as fl
from benchmarks.papers.architectures import MLP
from fl_lightning.algorithms import FedAvg, Federation, FedLF, FedMDFG, ServerRule

CLIENTS, ONLINE, BATCH, DECAY = 100, 10, 200, 0.999
MOST_FALLBACKS = 0.02  # share of the rounds that FedLF may merge layers or fall back in


@dataclass(frozen=True)
class Counts:
    """One round.

    Attributes:
        model: online clients that conflict with the step.
        blocks: the same per block of layers.
        merged: layers were solved together.
        flagged: the rule fell back.
        history: remembered updates that took part.
    """

    model: int
    blocks: tuple[int, ...]
    merged: bool
    flagged: bool
    history: int


class Counted(ServerRule):
    """A rule that counts the conflicts of its steps; for a single fit."""

    def __init__(self, rule: ServerRule) -> None:
        self.rule, self.needs, self.layers = rule, rule.needs, rule.layers
        self.counts: list[Counts] = []

    def begin_fit(self, federation: Federation) -> None:
        """As the rule."""
        self.rule.begin_fit(federation)

    def aggregate(self, cohort: fl.Cohort) -> Tensor:
        """The rule's step."""
        step = self.rule.aggregate(cohort)
        self.report, layout = self.rule.report, cohort.updates.layout
        rows, d, starts = cohort.updates.rows.double(), step.double(), layout.layer_starts
        blocks = getattr(self.rule, "blocks", None) or tuple((layer,) for layer in range(layout.num_layers))
        parts = [slice(starts[block[0]], starts[block[-1] + 1]) for block in blocks]
        self.counts.append(
            Counts(
                model=int((rows @ d < 0).sum()),
                blocks=tuple(int((rows[:, part] @ d[part] < 0).sum()) for part in parts),
                merged=len(blocks) < layout.num_layers,
                flagged=self.report.flagged,
                history=int(self.report.scalars.get("history_rows", 0)),
            )
        )
        return step


@dataclass(frozen=True)
class Result:
    """One fit; conflicts are clients, added up over all rounds (and blocks)."""

    rule: str
    classes: int
    seed: int
    rounds: int
    model: int
    blocks: int
    merged_or_flagged: float
    history_rows: float
    accuracy: float
    angle: float

    @property
    def as_required(self) -> bool:
        """Whether the counts are what the rule promises."""
        if self.rule == "FedLF":
            return self.model == self.blocks == 0 and self.merged_or_flagged <= MOST_FALLBACKS
        return self.rule != "FedMDFG" or self.model == 0


def run(
    rule: ServerRule, classes: int, train: TensorDataset, test: TensorDataset, rounds: int, lr: float, seed: int
) -> Result:
    """Trains for some rounds, and tests every client on its own classes."""
    L.seed_everything(seed, verbose=False)
    counted = Counted(rule)
    data = fl.FederatedDataModule(
        train, fl.data.Pathological(CLIENTS, classes), test=test, batch_size=BATCH, eval_batch_size=1000, seed=seed
    )
    module = fl.ClientModule(
        MLP(),
        optimizer=partial(torch.optim.SGD, lr=lr),
        lr_scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=DECAY),
        num_classes=10,
    )
    trainer = L.Trainer(
        max_epochs=rounds,
        strategy=fl.FederatedStrategy(counted, clients_per_round=ONLINE, seed=seed),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    with redirect_stdout(StringIO()):  # a line per client
        tested = trainer.test(module, data, verbose=False)[0]
    counts = counted.counts
    return Result(
        rule=type(rule).__name__,
        classes=classes,
        seed=seed,
        rounds=len(counts),
        model=sum(count.model for count in counts),
        blocks=sum(sum(count.blocks) for count in counts),
        merged_or_flagged=fmean(count.merged or count.flagged for count in counts),
        history_rows=fmean(count.history for count in counts),
        accuracy=tested["fed/test_acc/mean"],
        angle=tested["fed/test_acc/angle"],
    )


def load(root: Path, train: bool) -> TensorDataset:
    """Fashion-MNIST, scaled to [0, 1] as in the paper.

    Raises:
        SystemExit: it is not there.
    """
    try:
        split = FashionMNIST(root, train=train, download=False)
    except RuntimeError:
        raise SystemExit(
            f"--data-root must be a folder that holds FashionMNIST/raw with the four idx files, found none in {root}"
        ) from None
    return TensorDataset(split.data.float().div(255).flatten(1), split.targets)


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="folder that holds FashionMNIST/raw")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind, with seeds from 0")
    parser.add_argument("--lr", type=float, default=0.1, help="the paper tries 0.01, 0.05 and 0.1")
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    train, test = (load(arguments.data_root, split) for split in (True, False))
    print(f"{arguments.rounds} rounds, {ONLINE} of {CLIENTS} clients, batch {BATCH}, learning rate {arguments.lr}\n")
    print("| rule | classes | seed | conflicts, model | blocks | merged or flagged | history rows | acc | angle |")
    print("|---|---|---|---|---|---|---|---|---|")
    results = []
    for rule in (FedLF, FedMDFG, FedAvg):
        for classes in (1, 2):
            for seed in range(arguments.seeds):
                r = run(rule(), classes, train, test, arguments.rounds, arguments.lr, seed)
                results.append(r)
                print(
                    f"| {r.rule} | {r.classes} | {r.seed} | {r.model} | {r.blocks} | {r.merged_or_flagged:.1%} "
                    f"| {r.history_rows:.1f} | {r.accuracy:.3f} | {r.angle:.3f} |",
                    flush=True,
                )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    if not all(result.as_required for result in results):
        raise SystemExit("FedLF or FedMDFG conflicts with a client, or FedLF fell back too often")


if __name__ == "__main__":
    main()
