# SPDX-License-Identifier: Apache-2.0
"""chemprop's message passing network: molecular graphs as batches, and a Noam schedule that steps with every batch."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import made_data
from chemprop import data, featurizers, models, nn
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import fl_lightning as fl  # +


def main(folder: str | Path = "runs/molecules", epochs: int = 4, resume: str | Path | None = None) -> L.Trainer:
    """Trains on what four laboratories measured, tests the model of the best round, and predicts."""
    L.seed_everything(0)
    points = [data.MoleculeDatapoint.from_smi(smi, [y], name=lab) for lab, smi, y in made_data.molecules()]
    split = data.make_split_indices([point.mol for point in points], "random", (0.7, 0.15, 0.15))
    train, val, test = (part[0] for part in data.split_data_by_indices(points, *split))
    featurizer = featurizers.SimpleMoleculeMolGraphFeaturizer()
    train, val, test = (data.MoleculeDataset(part, featurizer) for part in (train, val, test))
    scaler = train.normalize_targets()
    val.normalize_targets(scaler)
    train_loader = data.build_dataloader(train, batch_size=8)
    val_loader = data.build_dataloader(val, batch_size=8, shuffle=False)
    test_loader = data.build_dataloader(test, batch_size=8, shuffle=False)
    model = models.MPNN(
        nn.BondMessagePassing(d_h=32),
        nn.MeanAggregation(),
        nn.RegressionFFN(
            input_dim=32, hidden_dim=32, output_transform=nn.UnscaleTransform.from_standard_scaler(scaler)
        ),
        batch_norm=True,
        metrics=[nn.metrics.RMSE(), nn.metrics.MAE()],
        warmup_epochs=1,
    )
    trainer = L.Trainer(
        strategy=fl.FederatedStrategy(partition=fl.data.ByKey(lambda dataset: dataset.names), clients_per_round=3),  # +
        max_epochs=epochs,
        accelerator="cpu",
        logger=CSVLogger(folder),
        callbacks=[
            ModelCheckpoint(folder, save_top_k=-1, monitor="val_loss"),
            EarlyStopping("val_loss", patience=10),
            LearningRateMonitor(),
        ],
    )
    trainer.fit(model, train_loader, val_loader, ckpt_path=resume, weights_only=False)  # its checkpoints hold metrics
    trainer.test(model, test_loader, ckpt_path="best", weights_only=False)
    trainer.predict(model, test_loader)
    return trainer


if __name__ == "__main__":
    main()
