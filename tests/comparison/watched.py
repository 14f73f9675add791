# SPDX-License-Identifier: Apache-2.0
"""A module whose fits write down what they do, and can be made to wait or to fail."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from support import Classifier

DIARY = "DIARY"
"""Environment variable: a folder."""


class Watched(Classifier):
    """Notes each round, waits where the file ``wait`` names its round, and fails where ``fail`` names its rate."""

    def __init__(
        self, lr: float = 0.1, momentum: float = 0.5, norm: bool = True, dropout: float = 0.2, log: bool = False,
        optimizer: str = "SGD",
    ) -> None:  # fmt: skip
        super().__init__(lr, momentum, log, dropout, norm, optimizer)

    def on_train_epoch_start(self) -> None:
        folder = Path(os.environ[DIARY])
        strategy = self.trainer.strategy
        method, seed = type(strategy.algorithm).__name__, strategy.options.seed
        clients = self.trainer.train_dataloader.loaders
        name = f"{method}x{len(clients)} {self.hparams.lr:g} {seed} {self.trainer.current_epoch}"
        if name in _lines(folder / "wait"):
            (folder / f"waits at {name}").touch()
            time.sleep(600)
        if f"{method} {self.hparams.lr:g} {seed}" in _lines(folder / "fail"):
            raise RuntimeError("no luck")
        for file, text in (("rounds", name), ("threads", torch.get_num_threads())):
            with (folder / file).open("a") as diary:
                diary.write(f"{text}\n")


def rounds(folder: Path) -> list[str]:
    """What fits have written down."""
    return _lines(folder / "rounds")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


class NoRate(Classifier):
    """Has its learning rate inside."""

    def __init__(self) -> None:
        super().__init__(lr=0.3)
