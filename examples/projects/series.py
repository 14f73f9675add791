# SPDX-License-Identifier: Apache-2.0
"""darts' TiDE model through ``TiDEModel.fit``, which makes its loaders itself and uses pytorch_lightning."""

from __future__ import annotations

from pathlib import Path

import made_data
import pytorch_lightning as pl
import torch
from darts import TimeSeries
from darts.models import TiDEModel
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger

import fl_lightning as fl  # +


def main(folder: str | Path = "runs/series", epochs: int = 2, resume: str | Path | None = None) -> pl.Trainer:
    """Trains on twelve shops' sales but for the last four weeks, and forecasts the next week."""
    sales = TimeSeries.from_group_dataframe(made_data.sales(), "unique_id", "ds", "y", freq="D")
    sales = [series.astype("float32") for series in sales]
    train, val = zip(*[series.split_after(61) for series in sales], strict=True)
    model = TiDEModel(
        input_chunk_length=14,
        output_chunk_length=7,
        hidden_size=16,
        decoder_output_dim=8,
        temporal_decoder_hidden=8,
        n_epochs=epochs,
        batch_size=64,
        random_state=0,
        optimizer_kwargs={"lr": 1e-3},
        lr_scheduler_cls=torch.optim.lr_scheduler.ExponentialLR,
        lr_scheduler_kwargs={"gamma": 0.9},
        use_static_covariates=False,
        pl_trainer_kwargs={
            "strategy": fl.FederatedStrategy(fl.algorithms.FedFV(), partition=fl.data.IID(4)),  # +
            "accelerator": "cpu",
            "logger": CSVLogger(folder),
            "enable_checkpointing": True,
            "callbacks": [ModelCheckpoint(folder, save_top_k=-1), EarlyStopping("val_loss"), LearningRateMonitor()],
        },
    )
    model.load_ckpt_path = None if resume is None else str(resume)
    model.fit(train, val_series=val)
    model.predict(7, series=list(sales))
    return model.trainer


if __name__ == "__main__":
    main()
