# SPDX-License-Identifier: Apache-2.0
"""One case: a federated fit whose rounds take turns with the hand-written loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

import fl_lightning as fl
from benchmarks._rounds.shape import SEED, HandWritten, Shape
from benchmarks._rounds.timing import Median, Moment, Turns
from benchmarks._rounds.workloads import Classifier, federated
from fl_lightning.fit.fit import FederatedFit


@dataclass(frozen=True)
class Case:
    """What our side does.

    Attributes:
        name: as the table has it.
        algorithm: makes the server rule.
        logs: ``self.log`` once per step.
        csv: with Lightning's CSVLogger.
        clip: ``gradient_clip_val`` of the Trainer, and what the hand-written loop clips gradients to.
    """

    name: str
    algorithm: Callable[[], fl.algorithms.ServerRule]
    logs: bool = False
    csv: bool = False
    clip: float | None = None


NO_LOG = Case("FedAvg, no self.log", fl.algorithms.FedAvg)
ONE_LOG = Case("FedAvg, one self.log per step", fl.algorithms.FedAvg, logs=True)
CSV = Case("FedAvg, one self.log per step, CSVLogger", fl.algorithms.FedAvg, logs=True, csv=True)
FEDLF = Case("FedLF, no self.log", fl.algorithms.FedLF)
CLIPPED = Case("FedAvg, gradients clipped to norm 1", fl.algorithms.FedAvg, clip=1.0)
CASES = (NO_LOG, ONE_LOG, CSV, FEDLF, CLIPPED)


@dataclass(frozen=True)
class Result:
    """Rounds of a case beside those of the hand-written loop.

    Attributes:
        ratio: ours by theirs, of pairs next to each other, in processor time.
        foreach: ours by the hand-written loop that steps with one ``torch._foreach_add_``, in the same way.
        ours: seconds of processor time per round.
        theirs: the same, of the hand-written loop.
        ours_wall: seconds on the wall per round.
        theirs_wall: the same, of the hand-written loop.
        server: seconds on the wall per round that the server side takes: aggregation, step, record.
        losses: loss pass over the cohort by a bare forward pass over the same data; ``None`` if the rule asks for none.
        faults: median page faults per round, ours and theirs.
        steps: local steps of ours per round; the hand-written loop's are checked to be as many.
        step_norms: norm of the last change of the global parameters, ours and theirs.
    """

    shape: str
    case: str
    ratio: Median
    foreach: Median
    ours: Median
    theirs: Median
    ours_wall: Median
    theirs_wall: Median
    server: Median
    losses: Median | None
    faults: tuple[float, float]
    steps: int
    step_norms: tuple[float, float]

    @cached_property
    def server_share(self) -> float:
        """The server side's part of a round."""
        return self.server.value / self.ours_wall.value


LOSS_BATCH = 1024
"""Samples per forward pass of the loss pass, ours and the bare one."""


class Timed(fl.FederatedStrategy):
    """Notes how long the server side of each round takes, and the loss pass beside a bare forward pass."""

    def __init__(self, algorithm: fl.algorithms.ServerRule, shape: Shape, x: Tensor, y: Tensor) -> None:
        super().__init__(algorithm, clients_per_round=shape.per_round, seed=SEED, loss_batch_size=LOSS_BATCH)
        self._shape, self._x, self._y = shape, x, y
        self.closing: list[float] = []
        begin, fits = self._fits.begin_fit, self._fits

        def begun() -> FederatedFit:
            self.running = fit = begin()
            close = fit.close_round

            def timed() -> None:
                began = time.perf_counter()
                close()
                self.closing.append(time.perf_counter() - began)

            fit.close_round = timed  # type: ignore[method-assign]
            return fit

        fits.begin_fit = begun  # type: ignore[method-assign]

    def loss_pass(self, repeats: int) -> Median:
        """Our pass over some clients' training losses by a bare forward pass, in turns, in processor time."""
        runner, needs = self.running.clients.runner, fl.algorithms.Needs(losses=True)
        module = self.lightning_module
        assert isinstance(module, Classifier)
        clients = range(self._shape.per_round)
        blocks = [runner.batches.loaders.indices(client) for client in clients]
        ratios = []
        for _ in range(repeats):
            start = Moment.now()
            for client in clients:
                runner.measure(client, 0, needs)
            ours = Moment.now() - start
            module.eval()
            with torch.no_grad():
                for block in blocks:
                    for chosen in block.split(LOSS_BATCH):
                        F.cross_entropy(module.net(self._x[chosen]), self._y[chosen])
            module.train()
            ratios.append(ours.cpu / (Moment.now() - start - ours).cpu)
        return Median.of(ratios[1:])


class LossPass(L.Callback):
    """Measures the loss pass when the fit is about to end and everything is still in place."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        self.ratio: Median | None = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All rounds are over."""
        assert isinstance(trainer.strategy, Timed)
        self.ratio = trainer.strategy.loss_pass(self._repeats)


def measure(shape: Shape, case: Case, pairs: int, warm_up: int, folder: Path) -> Result:
    """Runs a case.

    Raises:
        RuntimeError: one side did not take the local steps that the shape has.
    """
    torch.manual_seed(SEED)
    x, y = shape.data()
    hand_written = HandWritten(shape, x, y, case.clip)
    turns = Turns([hand_written, HandWritten(shape, x, y, case.clip, foreach=True)], warm_up)
    strategy = Timed(case.algorithm(), shape, x, y)
    losses = LossPass(max(pairs, 3)) if strategy.algorithm.needs.losses else None
    rounds = pairs + warm_up
    trainer = L.Trainer(
        max_epochs=rounds,
        strategy=strategy,
        accelerator="cpu",
        callbacks=[turns] if losses is None else [turns, losses],
        logger=CSVLogger(folder) if case.csv else False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=case.clip,
    )
    trainer.fit(Classifier(shape, case.logs), federated(shape, x, y))
    expected = rounds * shape.steps
    assert strategy.last_round is not None
    steps = strategy.last_round.local_steps
    if (steps, hand_written.steps) != (expected, expected):
        raise RuntimeError(f"both must take {expected} steps, found {steps} and {hand_written.steps}")
    ours, (theirs, foreach) = turns.ours, turns.theirs
    return Result(
        shape=shape.name,
        case=case.name,
        ratio=Median.of([a.cpu / b.cpu for a, b in zip(ours, theirs, strict=True)]),
        foreach=Median.of([a.cpu / b.cpu for a, b in zip(ours, foreach, strict=True)]),
        ours=Median.of([moment.cpu for moment in ours]),
        theirs=Median.of([moment.cpu for moment in theirs]),
        ours_wall=Median.of([moment.wall for moment in ours]),
        theirs_wall=Median.of([moment.wall for moment in theirs]),
        server=Median.of(strategy.closing[warm_up:]),
        losses=None if losses is None else losses.ratio,
        faults=(statistics.median(m.faults for m in ours), statistics.median(m.faults for m in theirs)),
        steps=shape.steps,
        step_norms=(strategy.last_round.step_norm, hand_written.step_norm),
    )
