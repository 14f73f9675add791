# SPDX-License-Identifier: Apache-2.0
"""torch-uncertainty's classification routine and MNIST data: torchvision transforms, DataLoader workers, metrics."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import made_data
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch_uncertainty.datamodules import MNISTDataModule
from torch_uncertainty.models.classification import lenet
from torch_uncertainty.optim_recipes import optim_cifar10_resnet18
from torch_uncertainty.routines import ClassificationRoutine

import fl_lightning as fl  # +


def main(folder: str | Path = "runs/image_classifier", epochs: int = 2, resume: str | Path | None = None) -> L.Trainer:
    """Trains a LeNet, and tests the model of the best round."""
    L.seed_everything(0)
    root = made_data.digits(Path(folder) / "data")
    data = MNISTDataModule(root, batch_size=32, val_split=0.2, num_workers=1, persistent_workers=False)
    data = fl.FederatedDataModule(data, fl.data.Dirichlet(num_clients=4, alpha=0.5))  # +
    network = lenet(in_channels=1, num_classes=10)
    model = ClassificationRoutine(
        num_classes=10, model=network, loss=torch.nn.CrossEntropyLoss(), optim_recipe=optim_cifar10_resnet18(network)
    )
    trainer = L.Trainer(
        strategy=fl.FederatedStrategy(fl.algorithms.FedLF(), clients_per_round=3),  # +
        max_epochs=epochs,
        accelerator="cpu",
        logger=[CSVLogger(folder), TensorBoardLogger(folder)],
        callbacks=[ModelCheckpoint(folder, monitor="val/cls/Acc", mode="max", save_top_k=-1), LearningRateMonitor()],
    )
    trainer.fit(model, data, ckpt_path=resume)
    trainer.test(model, data, ckpt_path="best")
    return trainer


if __name__ == "__main__":
    main()
