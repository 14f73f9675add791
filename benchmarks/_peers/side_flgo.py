# SPDX-License-Identifier: Apache-2.0
"""FLGo: its FedAvg or FedFV on a benchmark of our data; with workers, its own threads that train clients."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import flgo
import flgo.utils.fflow
from flgo.algorithm import fedavg, fedfv
from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe
from flgo.benchmark.toolkits.partition import IIDPartitioner

from benchmarks._peers.baton import Baton, Counted, flat, options

_CONFIG = """
import sys
from torch.utils.data import TensorDataset
from benchmarks._peers.baton import Counted
from benchmarks._rounds.shape import SHAPES

shape = SHAPES[{name!r}]
train_data = TensorDataset(*shape.data())

def get_model(*args, **kwargs):
    return Counted(shape.initial())
"""


def _samples(self: FromDatasetPipe.TaskDataset, indices: list[int]) -> list[object]:
    return [self[index] for index in indices]


def main() -> None:
    """Runs the rounds."""
    given = options()
    # Recent releases of torch refuse its data set without this method; these lines are torch's own suggestion.
    FromDatasetPipe.TaskDataset.__getitems__ = _samples
    shape, original = given.shape, {"fedavg": fedavg, "fedfv": fedfv}[given.method]

    class Server(original.Server):
        """Passes the baton after each round."""

        baton: Baton | None = None

        def iterate(self) -> object:
            """One round."""
            if Server.baton is None:
                Server.baton = Baton(shape, flat(self.model))
            updated = super().iterate()
            Server.baton.pass_on(flat(self.model), Counted.steps)
            return updated

    class Algorithm:
        """What FLGo takes for an algorithm."""

    Algorithm.Server, Algorithm.Client = Server, original.Client
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        Path("config.py").write_text(_CONFIG.format(name=shape.name))
        name = flgo.utils.fflow.gen_benchmark_from_file("peer", "config.py")
        benchmark = __import__(name)
        benchmark.visualize = lambda *_: None  # a picture of every sample's label, minutes of work before the start
        flgo.gen_task_by_(benchmark, IIDPartitioner(num_clients=shape.clients), "task")
        chosen = {
            "num_rounds": given.rounds, "proportion": shape.per_round / shape.clients, "num_epochs": 1,
            "learning_rate": shape.lr, "batch_size": float(shape.batch), "train_holdout": 0.0, "eval_interval": -1,
            "aggregate": "uniform", "no_log_console": True, "no_tqdm": True, "torch_num_threads": given.threads,
            "num_parallels": given.workers, "parallel_type": "t",
        }  # fmt: skip
        flgo.init("task", Algorithm, chosen).run()
        os.chdir("/")


if __name__ == "__main__":
    main()
