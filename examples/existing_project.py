# SPDX-License-Identifier: Apache-2.0
"""Use 1: an existing Lightning project, federated. The three changed lines are marked; digits.py is untouched."""

from __future__ import annotations

import lightning as L
from digits import DigitClassifier, Digits
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

import fl_lightning as fl  # 1


def main(rounds: int = 30) -> list[dict[str, float]]:
    """Trains, and tests the model of the round with the best mean accuracy."""
    data = fl.FederatedDataModule(Digits(), fl.data.Dirichlet(num_clients=20, alpha=0.3))  # 2
    strategy = fl.FederatedStrategy(fl.algorithms.FedLF(), clients_per_round=5)  # 3
    best = ModelCheckpoint(monitor="fed/val_acc/mean", mode="max")
    trainer = L.Trainer(
        max_epochs=rounds,
        strategy=strategy,
        accelerator="cpu",
        callbacks=[best, EarlyStopping("val_loss", patience=15)],
    )
    trainer.fit(DigitClassifier(), data)
    return [dict(values) for values in trainer.test(datamodule=data, ckpt_path="best")]


if __name__ == "__main__":
    main()
