# SPDX-License-Identifier: Apache-2.0
"""One side alone in its process, for its peak memory."""

from __future__ import annotations

import logging
import resource
import sys

import lightning as L
import torch

import fl_lightning as fl
from benchmarks._rounds.shape import SHAPES, HandWritten
from benchmarks._rounds.workloads import Classifier, federated

ROUNDS = 3


def main(name: str, side: str) -> None:
    """Runs three rounds and prints the peak resident MiB of the process."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    shape = SHAPES[name]
    x, y = shape.data()
    if side == "ours":
        trainer = L.Trainer(
            max_epochs=ROUNDS,
            strategy=fl.FederatedStrategy(clients_per_round=shape.per_round),
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Classifier(shape), federated(shape, x, y))
    else:
        loop = HandWritten(shape, x, y)
        for _ in range(ROUNDS):
            loop()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(peak / (2**20 if sys.platform == "darwin" else 2**10))
