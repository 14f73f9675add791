# SPDX-License-Identifier: Apache-2.0
"""pytorch-tabular's category embedding model on a table of numbers and categories. It uses pytorch_lightning."""

from __future__ import annotations

from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig
from pytorch_tabular.utils import make_mixed_dataset

import fl_lightning as fl  # +


def main(folder: str | Path = "runs/tabular", epochs: int = 3, resume: str | Path | None = None) -> pl.Trainer:
    """Trains on 480 rows, validates on 120, tests on 120."""
    pl.seed_everything(0)
    table, categories, numbers = make_mixed_dataset("classification", n_samples=720, n_features=8, n_categories=3)
    train, val, test = table[:480], table[480:600], table[600:]
    tabular = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=numbers, categorical_cols=categories),
        model_config=CategoryEmbeddingModelConfig(task="classification", layers="32-16", learning_rate=0.01),
        optimizer_config=OptimizerConfig(lr_scheduler="ExponentialLR", lr_scheduler_params={"gamma": 0.9}),
        trainer_config=TrainerConfig(batch_size=32),
    )
    data = tabular.prepare_dataloader(train, validation=val)
    model = tabular.prepare_model(data)
    train, val = data.train_dataloader(), data.val_dataloader()
    trainer = pl.Trainer(
        strategy=fl.FederatedStrategy(fl.algorithms.FedLF()),  # +
        max_epochs=epochs,
        accelerator="cpu",
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(folder, save_top_k=-1), EarlyStopping("valid_loss"), LearningRateMonitor()],
    )
    trainer.fit(
        model,
        # - train_dataloaders=train,
        # - val_dataloaders=val,
        fl.FederatedDataModule(train, fl.data.Dirichlet(num_clients=4, alpha=0.5), val=val),  # +
        ckpt_path=resume,
        weights_only=False,  # the module's hyperparameters are objects
    )
    trainer.validate(model, val)
    trainer.predict(model, data.prepare_inference_dataloader(test))
    return trainer


if __name__ == "__main__":
    main()
