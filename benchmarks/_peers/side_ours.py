# SPDX-License-Identifier: Apache-2.0
"""fl_lightning: in one process, with clients in worker processes, or on several ranks of torchrun."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from math import ceil

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loops import _EvaluationLoop
from torch import Tensor
from torch.utils.data import TensorDataset

import fl_lightning as fl
from benchmarks._peers.baton import Baton, Options, flat, options
from benchmarks._peers.meter import Meter
from benchmarks._rounds.fits import LOSS_BATCH
from benchmarks._rounds.shape import SEED, Shape
from benchmarks._rounds.workloads import Classifier, federated
from benchmarks._scaling.bounds import least_makespan
from benchmarks._scaling.model import client_sizes
from fl_lightning.clients.client_runner import ClientRunner
from fl_lightning.clients.ranks.column_rows import RowExchange
from fl_lightning.clients.visits import OutcomeReplayer
from fl_lightning.fit.fit import FederatedFit
from fl_lightning.lightning.ranks import Pending, Ranks

METHODS = {"fedavg": fl.algorithms.FedAvg, "fedfv": fl.algorithms.FedFV, "fedlf": fl.algorithms.FedLF}


class Turns(L.Callback):
    """Passes the baton after each round.

    Args:
        given: the side's options.
        probe: samples and labels for the accuracy.
    """

    def __init__(self, given: Options, probe: tuple[Tensor, Tensor]) -> None:
        self._given, self._probe = given, probe

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The first round is about to begin; all processes are connected."""
        assert isinstance(pl_module, Classifier)
        self._baton = Baton(self._given.shape, flat(pl_module.net), self._probe)
        divide(self._baton.meter)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The server step and the evaluation are done."""
        assert isinstance(pl_module, Classifier)
        assert isinstance(trainer.strategy, fl.FederatedStrategy)
        done, shape, size = trainer.strategy.last_round, self._given.shape, self._baton.meter.size
        assert done is not None
        least = None
        if self._given.uneven:
            sizes = uneven_sizes(shape)
            costs = [ceil(sizes[client] / shape.batch) for client in done.client_ids]
            least = least_makespan(costs, size) / sum(costs)
        self._baton.pass_on(flat(pl_module.net), done.local_steps, least=least)


def divide(meter: Meter) -> None:
    """Tells the parts of a round apart."""
    meter.watch(ClientRunner, "train", "training")
    meter.watch(OutcomeReplayer, "replay", "replay")
    meter.watch(FederatedFit, "close_round", "server step")
    meter.watch(_EvaluationLoop, "run", "evaluation")
    for kind in (Ranks, Pending, RowExchange):
        for name, method in list(vars(kind).items()):
            if inspect.isfunction(method) and not inspect.isgeneratorfunction(method) and not name.startswith("_"):
                meter.watch(kind, name, "exchange")


class Evaluated(Classifier):
    """Evaluates as well."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Loss and accuracy."""
        x, y = batch
        scores = self.net(x)
        self.log("val_loss", F.cross_entropy(scores, y))
        self.log("val_acc", (scores.argmax(1) == y).float().mean())


def uneven_sizes(shape: Shape) -> list[int]:
    """Samples of clients that differ as Dirichlet(0.1) over labels makes them; they take no more than there are."""
    drawn = client_sizes(shape.clients, shape.samples, 0.1, SEED)
    return [max(int(size * shape.samples * shape.clients / (drawn.sum() + shape.clients)), 1) for size in drawn]


def uneven(shape: Shape, x: Tensor, y: Tensor) -> fl.FederatedDataModule:
    """The same data, divided among clients that differ in size."""
    sizes = uneven_sizes(shape)
    parts = list(torch.arange(sum(sizes)).split(sizes))
    return fl.FederatedDataModule(TensorDataset(x, y), parts, batch_size=shape.batch)


def evaluated(shape: Shape, x: Tensor, y: Tensor) -> fl.FederatedDataModule:
    """The same data; every tenth sample is evaluated after each round, too."""
    parts = list(torch.arange(len(y)).split(shape.samples))
    val = TensorDataset(x[::10], y[::10])
    return fl.FederatedDataModule(TensorDataset(x, y), parts, val=val, batch_size=shape.batch, eval_batch_size=1024)


def strategy(method: str, per_round: int, workers: int) -> fl.FederatedStrategy:
    """The strategy; two clients at a time where workers are asked for.

    Raises:
        RuntimeError: this version trains one client at a time only.
    """
    rule, losses = METHODS[method](), LOSS_BATCH if method == "fedlf" else None
    known = inspect.signature(fl.FederatedStrategy).parameters
    if workers == 1:
        return fl.FederatedStrategy(rule, clients_per_round=per_round, loss_batch_size=losses)
    if "executor" not in known:
        raise RuntimeError("this version of fl_lightning trains one client at a time only")
    executor = fl.executors.Parallel(workers)
    return fl.FederatedStrategy(rule, clients_per_round=per_round, executor=executor)


def main() -> None:
    """Runs the rounds."""
    given = options()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    x, y = given.shape.data()
    trainer = L.Trainer(
        max_epochs=given.rounds,
        strategy=strategy(given.method, given.shape.per_round, given.workers),
        accelerator="gpu" if given.device == "cuda" else "cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        callbacks=[Turns(given, (x, y))],
        logger=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = evaluated if given.evaluate else uneven if given.uneven else federated
    trainer.fit((Evaluated if given.evaluate else Classifier)(given.shape), data(given.shape, x, y))


if __name__ == "__main__":
    main()
