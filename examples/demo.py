# SPDX-License-Identifier: Apache-2.0
"""Hand-written digits over 20 owners with two classes each: FedAvg beside FedLF, same rounds and learning rate.

Run by ``make demo``. Prints a per-client table and a comparison, writes the report ``demo/report.html``, draws
``demo/demo.png``, and leaves CSV logs in ``demo/FedAvg`` and ``demo/FedLF``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import lightning as L
import torch
from digits import DigitClassifier, Digits
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

import fl_lightning as fl

CLIENTS, CLASSES_EACH, PER_ROUND, ROUNDS, LR, SEED = 20, 2, 5, 100, 0.1, 0
LAST = 5  # rounds that the comparison averages over
ENOUGH = 0.8  # accuracy of the worst tenth whose first round the picture marks
COLOURS = {"FedAvg": "#0d86cb", "FedLF": "#e46d00"}  # as in the report


@dataclass(frozen=True)
class Run:
    """What one method did."""

    name: str
    record: fl.report.FitRecord
    final: fl.EvaluationRecord
    seconds: float

    @property
    def curves(self) -> fl.report.MetricSeries:
        """The clients' accuracy over the rounds."""
        return next(series for series in self.record.metrics if series.metric == "val_acc")

    def last(self, name: str) -> float:
        """The mean of a number over the last rounds."""
        return fmean(value for value in self.curves.summaries[name][-LAST:] if value is not None)


def train(algorithm: fl.algorithms.ServerRule, out: Path, rounds: int, seed: int) -> Run:
    """Federates the digits project with one method."""
    name = type(algorithm).__name__
    torch.manual_seed(seed)
    recorder = fl.callbacks.FitRecorder()
    data = fl.FederatedDataModule(Digits(), fl.data.Pathological(CLIENTS, CLASSES_EACH), seed=seed)
    strategy = fl.FederatedStrategy(algorithm, clients_per_round=PER_ROUND, seed=seed)
    trainer = L.Trainer(
        max_epochs=rounds,
        strategy=strategy,
        accelerator="cpu",
        logger=CSVLogger(out, name=name, version=""),
        callbacks=[recorder, fl.callbacks.ClientTable(), OneBar()],
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    began = time.perf_counter()
    trainer.fit(DigitClassifier(lr=LR), data)
    assert strategy.last_evaluation is not None
    return Run(name, recorder.record, strategy.last_evaluation, time.perf_counter() - began)


class OneBar(TQDMProgressBar):
    """One line per fit, which counts rounds: a demo's rounds are too short for a bar each."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=0)
        self._last = 0.0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Rewrites the line, at most ten times a second."""
        done = trainer.current_epoch + 1
        live = sys.stdout.isatty()
        due = time.perf_counter() - self._last > 0.1 if live else done % 20 == 0
        if due or done == trainer.max_epochs:
            self._last = time.perf_counter()
            shown = {name: trainer.callback_metrics[f"fed/val_acc/{name}"] for name in ("mean", "angle")}
            text = ", ".join(f"{name} {float(value):.3f}" for name, value in shown.items())
            method = type(trainer.strategy.algorithm).__name__
            start, end = ("\r", "\n" if done == trainer.max_epochs else "") if live else ("", "\n")
            print(f"{start}{method:8} round {done:3d} of {trainer.max_epochs}   {text}", end=end, flush=True)


def client_table(runs: list[Run]) -> str:
    """Accuracy of every client under both methods, worst under the first method on top."""
    first = runs[0].final.values["val_acc"]
    lines = ["client   samples " + "".join(f"{run.name:>9}" for run in runs)]
    for row in first.argsort(stable=True).tolist():
        values = "".join(f"{run.final.values['val_acc'][row]:9.3f}" for run in runs)
        lines.append(f"{runs[0].final.client_ids[row]:6d} {int(runs[0].final.sizes[row]):9d} {values}")
    return "\n".join(lines)


def comparison(runs: list[Run]) -> str:
    """Means over the last rounds, side by side."""
    rows = [
        ("mean accuracy", [run.last("mean") for run in runs]),
        ("fairness angle (rad)", [run.last("angle") for run in runs]),
        ("worst 10 %", [run.last("worst_10") for run in runs]),
        ("conflicts per round, model", [fmean(run.record.rounds.conflicts) for run in runs]),
        ("seconds", [run.seconds for run in runs]),
    ]
    head = f"{f'last {LAST} rounds':32}" + "".join(f"{run.name:>9}" for run in runs)
    return "\n".join([head] + [f"{name:32}" + "".join(f"{v:9.3f}" for v in values) for name, values in rows])


def draw(runs: list[Run], path: Path) -> None:
    """A panel per method: every client's accuracy over the rounds, and in bold the mean of the worst tenth."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    for axes, run in zip(figure.subplots(1, len(runs), sharey=True), runs, strict=True):
        color, rounds, worst = COLOURS[run.name], run.curves.rounds, run.curves.summaries["worst_10"]
        evaluations = {each.round: each.values["val_acc"] for each in run.record.evaluations}
        client, *_ = axes.plot(list(evaluations), list(evaluations.values()), color=color, linewidth=0.8, alpha=0.35)
        (bold,) = axes.plot(rounds, worst, color=color, linewidth=3.5)
        for at, value in zip(rounds, worst, strict=True):
            if value is not None and value >= ENOUGH:
                axes.plot(at, value, "o", color="black", markersize=11)
                axes.text(1, 0.04, f"● {ENOUGH:.0%} in round {at}", transform=axes.transAxes, ha="right", fontsize=16)
                break
        axes.set_title(run.name, color=color, fontsize=20, fontweight="bold")
        axes.set_xlabel("round", fontsize=15)
        axes.tick_params(labelsize=14)
        axes.spines[["top", "right"]].set_visible(False)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    figure.axes[0].set_ylabel("accuracy", fontsize=15)
    axes.legend((client, bold), ("one client", "worst tenth"), fontsize=14, frameon=False, bbox_to_anchor=(1, 0.45))
    figure.savefig(path, dpi=130)


def main() -> None:
    """Runs both methods and shows what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for picture and logs")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # small matrices: a second thread costs more than it brings
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(f"{CLIENTS} clients of {CLASSES_EACH} digits each, {PER_ROUND} per round, lr {LR}, seed {arguments.seed}")
    methods = (fl.algorithms.FedAvg(), fl.algorithms.FedLF())
    runs = [train(method, arguments.out, arguments.rounds, arguments.seed) for method in methods]
    picture = arguments.out / "demo.png"
    draw(runs, picture)
    report = fl.report.write_report([run.record for run in runs], arguments.out / "report.html")
    print(f"\n{client_table(runs)}\n\n{comparison(runs)}\n")
    logs = ", ".join(str(arguments.out / run.name / "metrics.csv") for run in runs)
    print(f"report {report}, to open in a browser; picture {picture}, logs {logs}")


if __name__ == "__main__":
    main()
