# SPDX-License-Identifier: Apache-2.0
"""What an evaluation that tells clients apart costs beside a plain one of the same batches.

    python -m benchmarks.evaluation [--clients 100] [--pairs 25] [--out DIR]

``trainer.validate`` of a federated project and of the same project without clients take turns in one process on one
thread; a pair gives one ratio, in processor time. Every client has one batch of 20 samples, and the module, an MLP
60-32-10, logs its loss and its accuracy in every step.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from dataclasses import asdict
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fl_lightning as fl
from benchmarks._rounds import report
from benchmarks._rounds.timing import Median, Moment

BATCH, FEATURES, CLASSES, WARM_UP = 20, 60, 10, 3


class Project(L.LightningModule):
    """Nothing federated about it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Logs the loss and the accuracy of a batch."""
        scores = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(scores, batch[1]))
        self.log("val_acc", (scores.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), 0.1)


def quiet(**options: object) -> L.Trainer:
    """A trainer that writes and prints nothing."""
    quietly = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return L.Trainer(accelerator="cpu", logger=False, max_epochs=1, **quietly, **options)  # type: ignore[arg-type]


def measure(clients: int, pairs: int) -> dict[str, Median]:
    """Ratios, and milliseconds of both sides.

    Args:
        clients: how many there are.
        pairs: evaluations of each side that count.
    """
    generator = torch.Generator().manual_seed(report.SEED)
    pixels = torch.randn(clients * BATCH, FEATURES, generator=generator)
    data = TensorDataset(pixels, torch.randint(0, CLASSES, (clients * BATCH,), generator=generator))
    module = Project()
    federated = fl.FederatedDataModule(data, fl.data.IID(clients), val=data, batch_size=BATCH)
    trainer, plain = quiet(strategy=fl.FederatedStrategy(clients_per_round=1)), quiet()
    loader = DataLoader(data, batch_size=BATCH)
    trainer.fit(module, federated)
    found = []
    for _ in range(WARM_UP + pairs):
        begun = Moment.now()
        [ours] = trainer.validate(module, federated, verbose=False)
        turn = Moment.now()
        [theirs] = plain.validate(module, loader, verbose=False)
        found.append((turn - begun, Moment.now() - turn))
        same = torch.tensor(ours["val_loss"]), torch.tensor(theirs["val_loss"])
        assert torch.allclose(*same), "both sides evaluate the same samples"
    kept = found[WARM_UP:]
    return {
        "ratio": Median.of([a.cpu / b.cpu for a, b in kept]),
        "ours": Median.of([1e3 * a.cpu for a, _ in kept]),
        "plain": Median.of([1e3 * b.cpu for _, b in kept]),
    }


def main() -> None:
    """Prints the ratio and writes it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=25, help="evaluations of each side (at least 3)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"), help="folder for the results")
    arguments = parser.parse_args()
    if arguments.pairs < 3 or arguments.clients < 1:
        parser.error(f"--pairs must be at least 3 and --clients 1, found {arguments.pairs} and {arguments.clients}")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    facts = report.environment((), arguments.pairs, "as the C library has it") | {"clients": arguments.clients}
    found = measure(arguments.clients, arguments.pairs)
    lines = ["# Evaluations", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["Processor time; medians with intervals that cover them with 95 %.", ""]
    lines.append(f"An evaluation that tells clients apart: {found['ratio'].text()} times as long as a plain one:")
    lines.append(f"{found['ours'].text(0)} and {found['plain'].text(0)} ms.")
    print("\n".join(lines))
    arguments.out.mkdir(parents=True, exist_ok=True)
    written = {"environment": facts, "results": {name: asdict(each) for name, each in found.items()}}
    (arguments.out / "evaluation.json").write_text(json.dumps(written, indent=1) + "\n")
    (arguments.out / "evaluation.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
