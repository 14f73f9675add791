# SPDX-License-Identifier: Apache-2.0
"""neuralforecast's NHITS through ``NeuralForecast.fit``, which makes its loaders and its Trainer itself.

It uses pytorch_lightning, and a StepLR that steps with every batch.
"""

from __future__ import annotations

from pathlib import Path

import made_data
import pytorch_lightning as pl
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS
from pytorch_lightning.callbacks import Callback, LearningRateMonitor
from pytorch_lightning.loggers import CSVLogger

import fl_lightning as fl  # +


class Trained(Callback):
    """Remembers the last Trainer that the library made and threw away."""

    last: pl.Trainer

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Runs at the start of every fit and prediction."""
        if stage == "fit":
            type(self).last = trainer


def main(folder: str | Path = "runs/forecast", epochs: int = 4, resume: str | Path | None = None) -> pl.Trainer:
    """Trains on twelve shops' sales but for the last two weeks, and forecasts the next week.

    The fit has twelve steps per epoch.

    Raises:
        ValueError: ``resume`` is given; the library's ``fit`` takes no checkpoint.
    """
    if resume is not None:
        raise ValueError(f"resume must be None: NeuralForecast.fit takes no checkpoint, found {resume}")
    model = NHITS(
        h=7,
        input_size=14,
        mlp_units=[[16, 16]] * 3,
        max_steps=12 * epochs,
        num_lr_decays=3,
        val_check_steps=12,
        early_stop_patience_steps=4,
        batch_size=1,
        windows_batch_size=32,
        scaler_type="robust",
        strategy=fl.FederatedStrategy(partition=fl.data.IID(4)),  # +
        accelerator="cpu",
        logger=CSVLogger(folder),
        callbacks=[Trained(), LearningRateMonitor()],
    )
    forecast = NeuralForecast(models=[model], freq="D")
    forecast.fit(made_data.sales(), val_size=14)
    forecast.predict()
    return Trained.last


if __name__ == "__main__":
    main()
