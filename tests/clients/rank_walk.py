# SPDX-License-Identifier: Apache-2.0
"""A program that several processes run together: everything that a project may use beside a method.

``rank_walk.py OUT 3 [NAME ...]`` writes ``OUT/rank-<r>.json``: digests and logged numbers by name.
"""

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from rank_session import FITS, OPTIONS, Classifier, Gathering, trained, written
from support import Blobs, Manual

import fl_lightning as fl

A, D, G, X = fl.algorithms, fl.data, fl.guards, fl.attacks


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Plateau(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Averages(Classifier):
    """Asks for averages over ranks, which there is nothing to take of."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("synced", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_synced", self(batch[0]).max(), sync_dist=True, on_step=True, on_epoch=True)


class OfTwoLoaders(Classifier):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)


class TwoLoaders(Blobs):
    def val_dataloader(self):
        return [super().val_dataloader(), super().test_dataloader()]


class Counts(L.Callback):
    """Sees the clients of a round one by one, as in one process."""

    def __init__(self):
        self.seen = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen += batch.client_id
        self.log("seen", float(self.seen))

    def on_validation_end(self, trainer, pl_module):
        if self.seen > 20:
            trainer.should_stop = True


TRUSTED = {"sampler": D.UniformSampler(always=(2,))}
OPTIONS_OF_STRATEGIES = {
    "FedPer": {"method": A.FedPer},
    "FA": {"method": lambda: A.FA(torch.eye(12).double(), sigma=4.0)},
    "two guards and FedLF": {"method": A.FedLF, "guard": [G.MultiKrum(1), G.CentredClipping(0.05)]},
    "CosineTrust": {"guard": G.CosineTrust(2), **TRUSTED},
    "FedPW behind Krum": {"method": A.FedPW, "guard": G.MultiKrum(1), "attack": X.ALIE([1, 2])},
    "ALIE of the honest": {"attack": X.ALIE([0, 1], z=0.5, knows="honest")},
    "targeted": {"attack": X.TargetedScaling([2], 0, 3)},
    "false reports": {"method": A.AFL, "attack": X.FalseReports([1, 2])},
    **{
        f"{where} privacy": {
            "method": lambda: A.FedAvg("uniform"),
            "buffers": "global",
            "client": A.DifferentialPrivacy(0.1, 0.5, where, uncovered="allow", seed=3),
        }
        for where in ("central", "local")
    },
    "availability": {"sampler": D.AvailabilitySampler(0.8, 0.2)},
    "weighted": {"sampler": D.SizeWeightedSampler()},
    "all clients": {"sampler": D.AllClients(), "clients_per_round": 7},
    "random updates": {"attack": fl.attacks.RandomUpdates([1, 3], match_norm=True)},
    "local steps": {"local_steps": 3},
    "two epochs": {"local_epochs": 2, "buffers": "largest"},
    "global buffers": {"buffers": "global"},
    "few": {"min_clients": 5, "sampler": D.AvailabilitySampler(0.5), "max_failed_rounds": None},
    "partition": {"partition": D.Dirichlet(7, 1.0), "data": Blobs()},
    "several loaders": {"partition": D.Dirichlet(7, 1.0), "data": TwoLoaders(), "module": OfTwoLoaders},
    "MOON and FedLF": {"method": A.FedLF, "client": A.MOON()},
    "FedDyn and FedHEAL": {"method": A.FedHEAL, "client": A.FedDyn()},
}
TRAINERS = {
    "clipping": {"gradient_clip_val": 0.5},
    "accumulation": {"accumulate_grad_batches": 2},
    "double": {"precision": "64-true"},
    "mixed": {"precision": "bf16-mixed"},
    "limits": {"limit_train_batches": 2, "limit_val_batches": 1},
    "steps": {"max_steps": 9, "rounds": -1},
    "interval": {"check_val_every_n_epoch": None, "val_check_interval": 6},
    "every other": {"check_val_every_n_epoch": 2},
    "reloading": {"reload_dataloaders_every_n_epochs": 1},
    "no sanity check": {"num_sanity_val_steps": 0},
}
CALLBACKS = {
    "EarlyStopping": lambda out: EarlyStopping("val_acc", mode="max", patience=1, min_delta=1.0),
    "Timer": lambda out: Timer(timedelta(hours=1)),
    "no time": lambda out: Timer(timedelta(0)),
    "timed checkpoints": lambda out: ModelCheckpoint(out / "timed", train_time_interval=timedelta(microseconds=1)),
    "best": lambda out: ModelCheckpoint(out / "best", monitor="val_loss", save_last=True),
    "by steps": lambda out: ModelCheckpoint(out / "steps", every_n_train_steps=4, save_top_k=-1),
    "counts": lambda out: Counts(),
}
if hasattr(lightning_callbacks, "EMAWeightAveraging"):  # since Lightning 2.6
    EMA = lightning_callbacks.EMAWeightAveraging
    CALLBACKS["EMAWeightAveraging"] = lambda out: EMA(update_every_n_steps=0, update_starting_at_epoch=0)
MODULES = {
    "schedulers": Scheduled, "plateau": Plateau, "sync_dist": Averages, "manual": Manual,
    "gathering in three": Gathering,
}  # fmt: skip


def cases(out):
    """By name, the arguments of a fit."""
    found = dict(OPTIONS_OF_STRATEGIES)
    found |= {name: {"trainer": options} for name, options in TRAINERS.items()}
    found |= {name: {"callbacks": [make(out)]} for name, make in CALLBACKS.items()}
    found |= {name: {"module": module} for name, module in MODULES.items()}
    found["Ditto's files"] = {"method": partial(A.Ditto, directory=str(out / "models"))}
    found["logger"] = {"trainer": {"logger": CSVLogger(out, "logs"), "log_every_n_steps": 1},
                       "callbacks": [LearningRateMonitor()], "module": Scheduled}  # fmt: skip
    return found


def main(out, devices, *names):
    devices, own = int(devices), Path(out) / f"{devices} ranks"
    results = {}
    for name, options in cases(own).items():
        if names and name not in names:
            continue
        options = dict(options)
        FITS["walk"] = (Classifier, options.pop("method", A.FedAvg), {})
        print(f"CASE {name}", flush=True)
        trainer, *results[name] = trained("walk", devices, **options)
    written(out, trainer, results)


if __name__ == "__main__":
    assert OPTIONS["dropout"], "clients draw random numbers"
    main(*sys.argv[1:])
