# SPDX-License-Identifier: Apache-2.0
"""Lightning's BoringModel, which has its loaders, a scheduler and every step with it."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

import fl_lightning as fl  # +


def main(folder: str | Path = "runs/boring", epochs: int = 4, resume: str | Path | None = None) -> L.Trainer:
    """Trains, validates, tests and predicts."""
    L.seed_everything(0)
    model = BoringModel()
    trainer = L.Trainer(
        strategy=fl.FederatedStrategy(fl.algorithms.FedMDFG(), clients_per_round=3),  # +
        max_epochs=epochs,
        accelerator="cpu",
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(folder, save_top_k=-1), LearningRateMonitor()],
    )
    # - trainer.fit(model, ckpt_path=resume)
    trainer.fit(model, fl.FederatedDataModule(model, fl.data.IID(5)), ckpt_path=resume)  # +
    trainer.validate(model)
    trainer.test(model)
    trainer.predict(model)
    return trainer


if __name__ == "__main__":
    main()
