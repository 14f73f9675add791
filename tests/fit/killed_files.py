# SPDX-License-Identifier: Apache-2.0
"""A fit of Ditto with models in files that dies while it writes one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support import Classifier, federated_blobs, fresh, quiet_trainer

import fl_lightning as fl
from fl_lightning.core.storage.per_client import ClientFiles

ROUNDS, DEATH = 5, 3


def fit_in_files(folder: Path, own: str, ckpt_path: Path | None = None):
    """A fit that saves after every round; its personal models live in ``folder / own``."""
    module = fresh(Classifier, seed=0 if ckpt_path is None else 9, norm=True, momentum=0.5, dropout=0.2)
    rule = fl.algorithms.Ditto(directory=str(folder / own))
    strategy = fl.FederatedStrategy(rule, clients_per_round=4, seed=2)
    saver = ModelCheckpoint(folder / "checkpoints", save_top_k=-1)
    options = {"callbacks": [saver], "enable_checkpointing": True}
    quiet_trainer(strategy, ROUNDS, **options).fit(module, federated_blobs(), ckpt_path=ckpt_path)
    return module, strategy


def die_in_the_third_file() -> None:
    """Of the cohort's four; it is half written then."""
    write, written = ClientFiles.keep, []

    def dying(self, client_id, model, when):
        if when == DEATH:
            written.append(client_id)
        if len(written) == 3:
            path = self._path(client_id, when)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f"{path.name}.part").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, client_id, model, when)

    ClientFiles.keep = dying


def fit_and_die(folder: Path) -> None:
    """What kills itself."""
    torch.set_num_threads(1)
    die_in_the_third_file()
    fit_in_files(folder, "own")
