# SPDX-License-Identifier: Apache-2.0
"""BlazeFL: its FedAvg, one client after the other; with workers, its pool of threads, or of processes on request."""

from __future__ import annotations

import inspect
import sys
import tempfile
from functools import cache, partialmethod
from pathlib import Path

import torch.multiprocessing
import tqdm
from blazefl.contrib import (
    FedAvgBaseClientTrainer,
    FedAvgBaseServerHandler,
    FedAvgProcessPoolClientTrainer,
    FedAvgThreadPoolClientTrainer,
)
from torch import Generator, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._peers.baton import Baton, Counted, flat, options
from benchmarks._rounds.shape import SHAPES, Shape

Trainer = FedAvgBaseClientTrainer | FedAvgThreadPoolClientTrainer | FedAvgProcessPoolClientTrainer


class Selector:
    """What it asks for networks: a name gives a new one."""

    def select_model(self, model_name: str) -> nn.Module:
        """The shape's network."""
        return Counted(SHAPES[model_name].initial())


@cache
def _parts(name: str) -> list[TensorDataset]:
    """All clients' data; forked processes have them without being sent any."""
    shape = SHAPES[name]
    x, y = shape.data()
    return [TensorDataset(*part) for part in zip(x.split(shape.samples), y.split(shape.samples), strict=True)]


class Parts:
    """What it asks for a client's data."""

    def __init__(self, shape: Shape) -> None:
        self._name = shape.name
        _parts(self._name)

    def get_dataloader(self, type_: str, cid: int, batch_size: int, generator: Generator) -> DataLoader:
        """One pass over a client's data."""
        return DataLoader(_parts(self._name)[cid], batch_size=batch_size, shuffle=True, generator=generator)

    def set_dataset(self, type_: str, cid: int, dataset: TensorDataset) -> None:
        """Nothing to keep: training leaves data as they are."""


def client_trainer(shape: Shape, data: Parts, workers: int, processes: bool, folder: Path) -> Trainer:
    """Who trains the clients."""
    common = {
        "model_selector": Selector(), "model_name": shape.name, "dataset": data, "device": "cpu",
        "num_clients": shape.clients, "epochs": 1, "batch_size": shape.batch, "lr": shape.lr, "seed": 0,
    }  # fmt: skip
    if workers == 1:
        return FedAvgBaseClientTrainer(**common)
    if not processes:
        return FedAvgThreadPoolClientTrainer(**common, num_parallels=workers)
    common |= {"state_dir": folder / "state", "num_parallels": workers}
    if "ipc_mode" in inspect.signature(FedAvgProcessPoolClientTrainer).parameters:  # 3.0 has shared memory alone
        common |= {"share_dir": folder / "share", "ipc_mode": "SHARED_MEMORY"}
    return FedAvgProcessPoolClientTrainer(**common)


def main() -> None:
    """Runs the rounds, as its examples do."""
    processes = "--processes" in sys.argv
    given = options()
    shape = given.shape
    torch.multiprocessing.set_start_method("fork")  # its pool is a new one in every round; a spawned one imports torch
    tqdm.tqdm.__init__ = partialmethod(tqdm.tqdm.__init__, disable=True)
    data = Parts(shape)
    share = shape.per_round / shape.clients
    handler = FedAvgBaseServerHandler(
        Selector(), shape.name, data, given.rounds, shape.clients, share, "cpu", shape.batch, 0
    )
    # At the first step torch imports what takes seconds. Forked processes find that done.
    torch.optim.SGD(Selector().select_model(shape.name).parameters(), lr=1.0).zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        trainer = client_trainer(shape, data, given.workers, processes, Path(folder))
        baton = Baton(shape, flat(handler.model))
        for _ in range(given.rounds):
            chosen = handler.sample_clients()
            trainer.local_process(handler.downlink_package(), chosen)
            for pack in trainer.uplink_package():
                handler.load(pack)
            baton.pass_on(flat(handler.model), None if processes else Counted.steps)


if __name__ == "__main__":
    # By its full name, so that processes find what they are sent.
    from benchmarks._peers import side_blazefl

    side_blazefl.main()
