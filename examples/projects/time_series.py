# SPDX-License-Identifier: Apache-2.0
"""pytorch-forecasting's Temporal Fusion Transformer on twelve series, one client each."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer
from pytorch_forecasting.data.examples import generate_ar_data

import fl_lightning as fl  # +


def main(folder: str | Path = "runs/time_series", epochs: int = 2, resume: str | Path | None = None) -> L.Trainer:
    """Trains on all but the last six values of each series, and evaluates on these."""
    L.seed_everything(0)
    table = generate_ar_data(seasonality=10.0, timesteps=40, n_series=12, seed=42)
    cutoff = table["time_idx"].max() - 6
    training = TimeSeriesDataSet(
        table[table["time_idx"] <= cutoff],
        time_idx="time_idx",
        target="value",
        group_ids=["series"],
        max_encoder_length=12,
        max_prediction_length=6,
        time_varying_known_reals=["time_idx"],
        time_varying_unknown_reals=["value"],
        target_normalizer=GroupNormalizer(groups=["series"]),
        add_relative_time_idx=True,
    )
    validation = TimeSeriesDataSet.from_dataset(training, table, min_prediction_idx=cutoff + 1)
    train, val = training.to_dataloader(batch_size=16), validation.to_dataloader(train=False, batch_size=64)
    model = TemporalFusionTransformer.from_dataset(
        training, learning_rate=0.03, hidden_size=8, loss=QuantileLoss(), log_interval=10, reduce_on_plateau_patience=4
    )
    trainer = L.Trainer(
        strategy=fl.FederatedStrategy(fl.algorithms.FedFV(), clients_per_round=4),  # +
        max_epochs=epochs,
        accelerator="cpu",
        gradient_clip_val=0.1,
        logger=TensorBoardLogger(folder),
        callbacks=[ModelCheckpoint(folder, save_top_k=-1), EarlyStopping("val_loss"), LearningRateMonitor()],
    )
    trainer.fit(
        model,
        # - train_dataloaders=train,
        # - val_dataloaders=val,
        fl.FederatedDataModule(train, fl.data.ByKey(lambda data: data.decoded_index["series"]), val=val),  # +
        ckpt_path=resume,
        weights_only=False,  # the module's hyperparameters are objects
    )
    trainer.validate(model, val)
    trainer.test(model, val)
    model.predict(val, trainer_kwargs={"accelerator": "cpu"})
    return trainer


if __name__ == "__main__":
    main()
