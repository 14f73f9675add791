# SPDX-License-Identifier: Apache-2.0
"""A fit that stops at a chosen place and waits to be killed."""

from __future__ import annotations

import io
import time
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from resuming import ALGORITHMS, Project
from support import Classifier, place_of_client

import fl_lightning as fl

OPTIONS = {"momentum": 0.9, "norm": True, "dropout": 0.2, "log": True}
ROUND = 2
"""The round in which the process dies."""


def project(folder: Path, algorithm: str, module: type[Classifier] = Classifier) -> Project:
    """Saves after every round; Ditto has its models in files, which lie in the folder."""
    own = partial(fl.algorithms.Ditto, directory=str(folder / "own"))
    return Project(
        own if algorithm == "Ditto" else ALGORITHMS[algorithm],
        module,
        OPTIONS,
        strategy={"client_optimizer_state": "keep"},
        callbacks=lambda files: [ModelCheckpoint(files, save_top_k=-1)],
    )


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


def write_half(folder: Path, where: str) -> None:
    """Makes the last of the files that are written in the round stop in the middle."""
    save = torch.save

    def half(content, file, *args, **kwargs):
        name = Path(file.name).name
        mine = name.startswith(f"round-{ROUND:06d}") if where == "own" else f"epoch={ROUND}-" in name
        if not mine or len(list(folder.glob(f"own/*/{name.removesuffix('.part')}"))) < 2 * (where == "own"):
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
    if where != "in a round":
        write_half(folder, where)
    project(folder, algorithm, Stopping if where == "in a round" else Classifier).fit(folder / "files")
