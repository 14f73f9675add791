# SPDX-License-Identifier: Apache-2.0
"""A fit that stops at a chosen place and waits to be killed."""

from __future__ import annotations

import io
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from resuming import ALGORITHMS, Project
from support import Classifier, place_of_client

OPTIONS = {"momentum": 0.9, "norm": True, "dropout": 0.2, "log": True}
ROUND = 2
"""The round in which the process dies."""


def project(algorithm: str, every_client: bool = False, module: type[Classifier] = Classifier) -> Project:
    others = [EveryClient] * every_client
    return Project(
        ALGORITHMS[algorithm],
        module,
        OPTIONS,
        strategy={} if ALGORITHMS[algorithm]().needs.full_gradients else {"client_optimizer_state": "keep"},
        callbacks=lambda folder: [ModelCheckpoint(folder, save_top_k=-1), *(callback(folder) for callback in others)],
    )


class EveryClient(L.Callback):
    """Saves after every client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"round-{trainer.current_epoch}-client-{batch_idx}.ckpt")


def wait_to_be_killed(folder: Path) -> None:
    (folder / "ready").touch()
    while True:
        time.sleep(60)


class Stopping(Classifier):
    """Waits in the second step of the last client."""

    folder: Path

    def training_step(self, batch, batch_idx):
        if self.trainer.current_epoch == ROUND and place_of_client(self.trainer) == 2 and batch_idx == 1:
            wait_to_be_killed(self.folder)
        return super().training_step(batch, batch_idx)


def write_half(folder: Path) -> None:
    """Makes the save of the last round stop in the middle of the file."""
    save = torch.save

    def half(content, file, *args, **kwargs):
        if content["epoch"] < ROUND:
            return save(content, file, *args, **kwargs)
        whole = io.BytesIO()
        save(content, whole)
        file.write(whole.getvalue()[: whole.tell() // 2])
        file.flush()
        return wait_to_be_killed(folder)

    torch.save = half


def fit(folder: Path, algorithm: str, where: str) -> None:
    """What is to be killed."""
    torch.set_num_threads(1)
    Stopping.folder = folder
    if where == "while saving":
        write_half(folder)
        project(algorithm).fit(folder / "files")
    else:
        project(algorithm, where == "in a round, saved per client", Stopping).fit(folder / "files")
