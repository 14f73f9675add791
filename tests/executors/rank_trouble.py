# SPDX-License-Identifier: Apache-2.0
"""A program that several processes run together, one of which gets into trouble.

``rank_trouble.py OUT 2 KIND`` writes ``OUT/rank-<r>.json`` if the fit ends by itself or is asked to.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from rank_session import Classifier, federated_blobs, trained, written

import fl_lightning as fl
from fl_lightning.core.lightning.ranks import Pending, Ranks
from fl_lightning.core.updates import UpdateMatrix

OUT, DEVICES, KIND = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ROUNDS = 4


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
    "long": lambda: time.sleep(2),
}


class Troubled(Classifier):
    def training_step(self, batch, batch_idx):
        once_on_rank_1(self.trainer, IN_VISITS[KIND])
        return super().training_step(batch, batch_idx)


class Counts(Classifier):
    def training_step(self, batch, batch_idx):
        self.steps = getattr(self, "steps", 0) + 1
        return super().training_step(batch, batch_idx)


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

    def on_train_epoch_end(self, trainer, pl_module):
        rank, act = AT_ENDS[KIND]
        if trainer.current_epoch == 1 and trainer.global_rank == rank:
            act(trainer, pl_module)


class Tells(L.Callback):
    """Writes down with what a fit was ended, and where."""

    def on_exception(self, trainer, pl_module, exception):
        written(OUT, trainer, {"round": trainer.current_epoch, "error": type(exception).__name__})


def saving():
    """A checkpoint per round, and one where the fit is ended."""
    return [ModelCheckpoint(dirpath=OUT, save_top_k=-1), OnExceptionCheckpoint(OUT, "interrupted"), Tells()]


def main():
    case = "SCAFFOLD with FedLF"
    if KIND in IN_VISITS:
        seconds = {"hang": 5}.get(KIND, 120)
        found = fl.newest_checkpoint(OUT)
        trainer, *result = trained(
            case, DEVICES, ROUNDS, resume=found, module=Troubled, callbacks=saving(), timeout=timedelta(seconds=seconds)
        )
        written(OUT, trainer, {case: result})
    elif KIND == "resume":
        trainer, *result = trained(case, DEVICES, ROUNDS, resume=fl.newest_checkpoint(OUT))
        written(OUT, trainer, {case: result})
    elif KIND == "data":
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        trained("FedAvg", DEVICES, data=federated_blobs(7, alpha=1.0 + rank))
    elif KIND == "rows":
        Ranks.transfer = lambda self, sends, receives, number=0: Pending(self, [])
        trained("FedAvg", DEVICES)
    elif KIND == "counts":
        trained("FedAvg", DEVICES, module=Counts)
    else:
        trainer, *result = trained("FedAvg", DEVICES, ROUNDS, callbacks=[Misbehaves()])
        written(OUT, trainer, {"round": trainer.current_epoch, "result": result})


if __name__ == "__main__":
    main()
