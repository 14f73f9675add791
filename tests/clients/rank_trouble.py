# SPDX-License-Identifier: Apache-2.0
"""A program that several processes run together, one of which gets into trouble.

``rank_trouble.py OUT 2 KIND`` writes ``OUT/rank-<r>.json`` if the fit ends by itself or is asked to.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from rank_session import FITS, Classifier, trained, written
from support import Blobs, blobs
from torch.utils.data import DataLoader

import fl_lightning as fl
from fl_lightning.core.updates import UpdateMatrix
from fl_lightning.lightning import versions
from fl_lightning.lightning.ranks import Pending, Ranks

OUT, DEVICES, KIND = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ROUNDS = 3


def once_on_rank_1(trainer, act):
    """In the second round, rank 1 does something in the middle of a client, while rank 0 is at one."""
    begun = OUT / "begun"
    if trainer.current_epoch != 1 or begun.exists():
        return
    if trainer.global_rank == 1:
        begun.touch()
        act()
    end = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < end:
        time.sleep(0.01)


def kill(number):
    return lambda: os.kill(os.getpid(), number)


IN_VISITS = {
    "terminate": kill(signal.SIGTERM),
    "die": kill(signal.SIGKILL),
    "hang": lambda: time.sleep(1000),
    "requeue": kill(signal.SIGUSR1),
    "long": lambda: time.sleep(2),
}


class Troubled(Classifier):
    def training_step(self, batch, batch_idx):
        once_on_rank_1(self.trainer, IN_VISITS[KIND])
        return super().training_step(batch, batch_idx)


class Wide(Classifier):
    def __init__(self, **options):
        super().__init__(**options)
        self.more = torch.nn.Linear(2, 2)


def stop(trainer, module):
    trainer.should_stop = True


def fail(trainer, module):
    raise OSError("the disk is full")


def disturb(trainer, module):
    with torch.no_grad():
        next(module.parameters()).view(-1)[0] += 1e-3


def bend(trainer, module):
    combine = UpdateMatrix.combine
    UpdateMatrix.combine = lambda self, coeff, out=None: combine(self, coeff * (1 + 1e-7), out)


AT_ENDS = {
    "stop": (1, stop),
    "raise": (0, fail),
    "kill": (1, lambda trainer, module: os.kill(os.getpid(), signal.SIGKILL)),
    "weights": (1, disturb),
    "coefficients": (1, bend),
}


class Misbehaves(L.Callback):
    """Does on one rank, at the end of the second round, what a rank must not do alone."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch != 1:
            return
        if KIND == "between" and batch_idx == 2:
            pl_module.temperature = 2.0
        if KIND == "state" and batch_idx == 4 and trainer.global_rank == 1:
            weights = trainer.strategy.algorithm.lam
            weights[min(weights)] += 1e-6

    def on_train_epoch_end(self, trainer, pl_module):
        rank, act = AT_ENDS.get(KIND, (None, None))
        if trainer.current_epoch == 1 and trainer.global_rank == rank:
            act(trainer, pl_module)


class OtherValidation(Blobs):
    """Its validation data depends on the rank."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def val_dataloader(self):
        return DataLoader(blobs(80, 1 + self.rank), batch_size=10)


class TrainingOnly(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(blobs(240), batch_size=10, shuffle=True)


def other_version(rank):
    versions.__version__ = f"0.{rank}"
    return {}


def other_argument(rank):
    FITS["TERM"] = (Classifier, partial(fl.algorithms.TERM, t=1.0 + rank), {})
    return {"case": "TERM"}


def divided(data, seed=0):
    return fl.FederatedDataModule(data, fl.data.IID(6), seed=seed)


DIFFERENCES = {
    "sizes": lambda rank: {"data": fl.FederatedDataModule(TrainingOnly(), fl.data.Dirichlet(7, 1.0 + rank), seed=0)},
    "places": lambda rank: {"data": divided(TrainingOnly(), seed=rank)},
    "validation": lambda rank: {"data": divided(OtherValidation(rank))},
    "option": lambda rank: {"local_epochs": 1 + rank},
    "argument": other_argument,
    "trainer": lambda rank: {"rounds": 3 + rank},
    "module": lambda rank: {"module": lambda **options: Classifier(**{**options, "lr": 0.1 * (1 + rank)})},
    "shapes": lambda rank: {"module": [Classifier, Wide][rank]},
    "version": other_version,
}
"""What a rank has that the others have not."""


class Tells(L.Callback):
    """Writes down with what a fit was ended, and where."""

    def on_exception(self, trainer, pl_module, exception):
        written(OUT, trainer, {"round": trainer.current_epoch, "error": type(exception).__name__})


def saving():
    """A checkpoint per round, and one where the fit is ended."""
    return [ModelCheckpoint(dirpath=OUT, save_top_k=-1), OnExceptionCheckpoint(OUT, "interrupted"), Tells()]


def main(*_):
    case = "SCAFFOLD with FedLF"
    if KIND in IN_VISITS:
        seconds = {"hang": 5}.get(KIND, 120)
        found = fl.newest_checkpoint(OUT)
        if KIND == "requeue":  # no test: under SLURM, Lightning would load what it has saved for the queue
            FITS[case] = (Troubled, *FITS[case][1:])
        trainer, *result = trained(
            case, DEVICES, ROUNDS, resume=found, module=Troubled, callbacks=saving(), timeout=timedelta(seconds=seconds)
        )
        written(OUT, trainer, {case: result})
    elif KIND == "resume":
        trainer, *result = trained(case, DEVICES, ROUNDS, resume=fl.newest_checkpoint(OUT))
        written(OUT, trainer, {case: result})
    elif KIND == "differ":
        rank, said = int(os.environ.get("LOCAL_RANK", "0")), {}
        for name, differs in DIFFERENCES.items():
            with pytest.raises(ValueError, match="all ranks must") as raised:
                trained(**{"case": "FedAvg", "devices": DEVICES, **differs(rank)})
            said[name] = str(raised.value)
        (OUT / f"rank-{rank}.json").write_text(json.dumps(said))
    elif KIND == "rows":
        Ranks.transfer = lambda self, sends, receives, number=0: Pending(self, [])
        trained("FedAvg", DEVICES)
    else:
        trainer, *result = trained("AFL" if KIND == "state" else "FedAvg", DEVICES, ROUNDS, callbacks=[Misbehaves()])
        written(OUT, trainer, {"round": trainer.current_epoch, "result": result})


if __name__ == "__main__":
    main()
