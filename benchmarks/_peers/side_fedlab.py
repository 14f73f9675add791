# SPDX-License-Identifier: Apache-2.0
"""FedLab: its serial trainer and synchronous server, in one process."""

from __future__ import annotations

import logging

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._peers.baton import Baton, Counted, Options, options


class Parts:
    """What its trainer asks for a client's data; a loader that shuffles, as its own data sets have."""

    def __init__(self, given: Options) -> None:
        size = given.shape.samples
        x, y = given.shape.data()
        self._parts = [TensorDataset(*part) for part in zip(x.split(size), y.split(size), strict=True)]

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader:
        """One pass over a client's data."""
        return DataLoader(self._parts[client], batch_size=batch_size, shuffle=True)


class Pipeline(StandalonePipeline):
    """Passes the baton after each round."""

    baton: Baton

    def evaluate(self) -> None:
        """Called by FedLab when a round is over."""
        self.baton.pass_on(self.handler.model_parameters, Counted.steps)


def main() -> None:
    """Runs the rounds."""
    given = options()
    shape = given.shape
    logging.disable(logging.INFO)
    handler = SyncServerHandler(Counted(shape.initial()), given.rounds, shape.per_round / shape.clients)
    trainer = SGDSerialClientTrainer(Counted(shape.initial()), shape.clients)
    trainer.setup_dataset(Parts(given))
    trainer.setup_optim(1, shape.batch, shape.lr)
    pipeline = Pipeline(handler, trainer)
    pipeline.baton = Baton(shape, handler.model_parameters)
    pipeline.main()


if __name__ == "__main__":
    main()
