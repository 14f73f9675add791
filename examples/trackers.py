# SPDX-License-Identifier: Apache-2.0
"""Use 5: per-client numbers and fairness in TensorBoard, MLflow, W&B or CSV files.

python examples/trackers.py tensorboard     # or csv, mlflow, wandb
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning as L
from digits import DigitClassifier, Digits
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

import fl_lightning as fl

TRACKERS = ("tensorboard", "csv", "mlflow", "wandb")


def make_logger(tracker: str, folder: Path) -> Logger:
    """Lightning's own loggers, each with files below one folder and without a server."""
    folder.mkdir(parents=True, exist_ok=True)
    if tracker == "tensorboard":
        return TensorBoardLogger(folder, name="digits")
    if tracker == "csv":
        return CSVLogger(folder, name="digits")
    if tracker == "mlflow":
        return MLFlowLogger(
            "digits",
            tracking_uri=f"sqlite:///{folder.resolve() / 'mlflow.db'}",
            artifact_location=(folder / "artifacts").resolve().as_uri(),
        )
    return WandbLogger(project="digits", save_dir=folder, offline=True)


def main(tracker: str = "tensorboard", folder: Path = Path("runs"), rounds: int = 10) -> L.Trainer:
    """Trains and tests six clients with three digits each; one of the trackers gets every number and the table."""
    L.seed_everything(0, verbose=False)
    data = fl.FederatedDataModule(Digits(), fl.data.Pathological(num_clients=6, classes_per_client=3), seed=0)
    trainer = L.Trainer(
        max_epochs=rounds,
        strategy=fl.FederatedStrategy(fl.algorithms.FedLF(), clients_per_round=3, seed=0),
        accelerator="cpu",
        logger=make_logger(tracker, folder),
        callbacks=[fl.callbacks.ClientTable()],
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = DigitClassifier()
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tracker", choices=TRACKERS)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--rounds", type=int, default=10)
    main(**vars(parser.parse_args()))
