# SPDX-License-Identifier: Apache-2.0
"""What a federated round costs beside a hand-written PyTorch loop that does the same work.

    python -m benchmarks.rounds [--pairs 31] [--json FILE]

One round of ours and one of the hand-written loop are timed in turn, in the same process, as CPU time on one thread; a
pair gives one ratio. Pairs taken next to each other share whatever else the machine is doing.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fl_lightning as fl

CLIENTS, SAMPLES, BATCH, LR, WARM_UP = 10, 600, 50, 0.05, 3


def network() -> nn.Module:
    """The MLP 784-200-200-10 of the papers' FMNIST experiments."""
    return fl.models.MLP()


class Classifier(L.LightningModule):
    """The network as a Lightning project has it."""

    def __init__(self, logs: bool) -> None:
        super().__init__()
        self.net, self.logs = network(), logs

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy; logged once per step if asked for."""
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        if self.logs:
            self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=LR)


def hand_written(x: Tensor, y: Tensor) -> Callable[[], None]:
    """Federated averaging as one writes it for a single experiment; returns a function that runs one round."""
    model = network()
    parameters = list(model.parameters())
    weights = [p.detach().clone() for p in parameters]

    def one_round() -> None:
        update = [torch.zeros_like(w) for w in weights]
        for client in range(CLIENTS):
            with torch.no_grad():
                for p, w in zip(parameters, weights, strict=True):
                    p.copy_(w)
            optimizer = torch.optim.SGD(parameters, lr=LR)
            order = client * SAMPLES + torch.randperm(SAMPLES)
            for chosen in order.split(BATCH):
                loss = F.cross_entropy(model(x[chosen]), y[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                for u, p, w in zip(update, parameters, weights, strict=True):
                    u.add_(p - w, alpha=1 / CLIENTS)
        for w, u in zip(weights, update, strict=True):
            w.add_(u)

    return one_round


class Pairs(L.Callback):
    """Times our round, then the other one."""

    def __init__(self, other: Callable[[], None]) -> None:
        self.other, self.ours, self.theirs = other, [0.0], [0.0]
        self.mark = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The first round begins."""
        self.mark = time.process_time()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A round of ours is over, from the end of the last one: loops, logging and server step included."""
        ended = time.process_time()
        self.ours.append(ended - self.mark)
        self.other()
        self.mark = time.process_time()
        self.theirs.append(self.mark - ended)


@dataclass(frozen=True)
class Result:
    """CPU-time ratio of ours to the hand-written loop over interleaved pairs of rounds."""

    case: str
    median: float
    low: float
    high: float
    pairs: int
    ours_ms: float
    hand_written_ms: float


def measure(case: str, logs: bool, csv: Path | None, algorithm: fl.algorithms.ServerRule, pairs: int) -> Result:
    """Runs one case; ``low`` and ``high`` are the quartiles of the ratios."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS * SAMPLES, 784, generator=generator)
    y = torch.randint(0, 10, (CLIENTS * SAMPLES,), generator=generator)
    parts = list(torch.arange(CLIENTS * SAMPLES).split(SAMPLES))
    timer = Pairs(hand_written(x, y))
    trainer = L.Trainer(
        max_epochs=pairs + WARM_UP,
        strategy=fl.FederatedStrategy(algorithm, clients_per_round=CLIENTS),
        accelerator="cpu",
        callbacks=[timer],
        logger=False if csv is None else CSVLogger(csv),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(logs), fl.FederatedDataModule(TensorDataset(x, y), parts, batch_size=BATCH))
    ours, theirs = timer.ours[1 + WARM_UP :], timer.theirs[1 + WARM_UP :]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return Result(case, median, low, high, len(ratios), 1e3 * statistics.median(ours), 1e3 * statistics.median(theirs))


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=31, help="pairs of rounds per case (at least 15)")
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    if arguments.pairs < 15:
        parser.error(f"--pairs must be at least 15, found {arguments.pairs}")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"torch {torch.__version__}, lightning {L.__version__}, one thread, CPU time")
    print(f"MLP 784-200-200-10, batch {BATCH}, {CLIENTS} clients of {SAMPLES // BATCH} batches per round\n")
    print("| case | ratio to hand-written | quartiles | pairs | ours, ms/round | hand-written, ms/round |")
    print("|---|---|---|---|---|---|")
    algorithms = fl.algorithms
    cases = (
        ("FedAvg, no self.log", False, False, algorithms.FedAvg()),
        ("FedAvg, one self.log per step", True, False, algorithms.FedAvg()),
        ("FedAvg, one self.log per step, CSVLogger", True, True, algorithms.FedAvg()),
        ("FedLF, no self.log", False, False, algorithms.FedLF()),
    )
    results = []
    with TemporaryDirectory() as folder:
        for name, logs, csv, algorithm in cases:
            r = measure(name, logs, Path(folder) if csv else None, algorithm, arguments.pairs)
            results.append(r)
            print(
                f"| {r.case} | {r.median:.3f} | {r.low:.3f} to {r.high:.3f} | {r.pairs} "
                f"| {r.ours_ms:.1f} | {r.hand_written_ms:.1f} |",
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
