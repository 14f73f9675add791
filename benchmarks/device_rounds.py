# SPDX-License-Identifier: Apache-2.0
"""Rounds of W1 and W2 on a GPU: the strategy beside a loop written by hand.

    python -m benchmarks.device_rounds [--device cuda|cpu] [--quick] [--shapes W1 W2] [--out DIR]

Both sides take turns, one round each; the clock starts and stops when the device is idle. What counts is the ratio of
each round to the loop's just before it: its median and quartiles. The loop has all data on the device; the strategy is
measured so, and with the data in the host's memory. ``--device cpu`` tries the program; benchmarks.rounds measures
that.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import lightning as L
import torch

import fl_lightning as fl
from benchmarks._gpu.facts import add_device, facts
from benchmarks._kernels.timing import Spread
from benchmarks._rounds.shape import SEED, SHAPES, HandWritten, Shape
from benchmarks._rounds.workloads import Classifier, federated

ROUNDS, WARM_UP = 12, 3
RULES = (fl.algorithms.FedAvg, fl.algorithms.FedLF)


@dataclass(frozen=True)
class Result:
    """Rounds of the strategy beside those of the loop.

    Attributes:
        data: where the samples lie.
        pairs: seconds on the wall of each round, and of the loop's just before it.
        steps: local steps per round.
        moved: whether both sides ended elsewhere than they began, with finite weights.
    """

    shape: str
    rule: str
    data: str
    pairs: list[tuple[float, float]]
    steps: int
    moved: bool

    def markdown(self) -> str:
        """One line of the table."""
        ours, theirs = (Spread.of(list(times)).median for times in zip(*self.pairs, strict=True))
        ratio = Spread.of([one / other for one, other in self.pairs])
        return (
            f"| {self.shape} | {self.rule} | {self.data} | {1e3 * ours:.2f} | {1e3 * theirs:.2f} "
            f"| {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) | {self.steps / ours:.0f} "
            f"| {'yes' if self.moved else '**no**'} |"
        )


HEAD = (
    "| shape | method | data on the | ours, ms per round | loop by hand | ours by the loop | steps/s ours | moved |\n"
    + 8 * "|---"
    + "|"
)


class Turns(L.Callback):
    """Times each round of the fit, and one of the loop before it."""

    def __init__(self, loop: Callable[[], None], device: torch.device) -> None:
        self.loop, self.device, self._began = loop, device, 0.0
        self.ours: list[float] = []
        self.theirs: list[float] = []

    def now(self) -> float:
        """Seconds, once the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A round of the loop, then ours begins."""
        began = self.now()
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            self.loop()
        self._began = self.now()
        self.theirs.append(self._began - began)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ours ends."""
        self.ours.append(self.now() - self._began)


def measure(
    shape: Shape, rule: type[fl.algorithms.ServerRule], device: torch.device, where: torch.device, rounds: int
) -> Result:
    """Rounds in turns, after ``WARM_UP`` that do not count; the strategy's data lie on the device ``where``."""
    torch.manual_seed(SEED)
    x, y = shape.data()
    loop = HandWritten(shape, x.to(device), y.to(device))
    turns, module = Turns(loop, device), Classifier(shape)
    start = torch.cat([p.detach().flatten() for p in module.parameters()]).clone()
    trainer = L.Trainer(
        max_epochs=rounds + WARM_UP,
        strategy=fl.FederatedStrategy(rule(), clients_per_round=shape.per_round, seed=SEED),
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        callbacks=[turns],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, federated(shape, x.to(where), y.to(where)))
    end = torch.cat([p.detach().flatten() for p in module.parameters()]).cpu()
    moved = bool(end.isfinite().all()) and not torch.equal(end, start) and loop.step_norm > 0
    pairs = list(zip(turns.ours, turns.theirs, strict=True))[WARM_UP:]
    return Result(shape.name, rule.__name__, where.type, pairs, shape.steps, moved)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument("--quick", action="store_true", help="a tiny shape, a few seconds: tries the program only")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=("W1", "W2"))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"), help="folder for the results")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    chosen = [SHAPES[name] for name in (("tiny",) if arguments.quick else arguments.shapes)]
    environment = facts(device) | {"rounds": str(2 if arguments.quick else ROUNDS), "seed": str(SEED)}
    environment |= {shape.name: shape.what for shape in chosen}
    head = ["# Rounds on a device", "", *(f"- {name}: {value}" for name, value in environment.items()), "", HEAD]
    print("\n".join(head), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"device-rounds-{arguments.device}{'-quick' * arguments.quick}"
    results: list[Result] = []
    for shape in chosen:
        for rule in RULES:
            for where in dict.fromkeys((device, torch.device("cpu"))):
                results.append(measure(shape, rule, device, where, int(environment["rounds"])))
                print(results[-1].markdown(), flush=True)
                file.with_suffix(".md").write_text("\n".join([*head, *(r.markdown() for r in results), ""]), "utf-8")
                written = {"environment": environment, "results": [asdict(result) for result in results]}
                file.with_suffix(".json").write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    if not all(result.moved for result in results):
        raise SystemExit("some weights did not move, or are not finite")


if __name__ == "__main__":
    main()
