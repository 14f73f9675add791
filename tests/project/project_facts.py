# SPDX-License-Identifier: Apache-2.0
"""What is known of each project in examples/projects; its versions stand in examples/projects/requirements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Facts:
    """What the cases ask of a project.

    Attributes:
        package: its cases are skipped where this cannot be imported.
        tree: the copy of Lightning that it uses.
        schedule: what moves its learning rates; ``None`` if nothing does.
        evaluated: metrics that the last validation of its fit has for every client.
        undefined: by metric, words of the reason why it is undefined for some client.
        differs: what one client does not share bit for bit with the project as it was, and why. Keys are regular
            expressions of logged names, or ``"weights"``.
        rounds: rounds of a federated fit for each of the script's epochs, where the library counts steps.
        resumes: whether the library's training can go on from a checkpoint.
        sequential: the reason why ``Parallel`` trains its clients sequentially; ``None`` if it does not.
    """

    package: str = "lightning"
    tree: str = "lightning.pytorch"
    schedule: str | None = None
    evaluated: tuple[str, ...] = ()
    undefined: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    rounds: int = 1
    resumes: bool = True
    sequential: str | None = None


PROJECTS = {
    "bert": Facts(
        package="transformers",
        schedule="linear warm-up and decay per step",
        evaluated=("val_loss", "val_MulticlassAccuracy"),
    ),
    "boring": Facts(schedule="StepLR per epoch"),
    "byol": Facts(package="lightly", tree="pytorch_lightning"),
    "forecast": Facts(
        package="neuralforecast", tree="pytorch_lightning", schedule="StepLR per step", rounds=4, resumes=False
    ),
    "graphs": Facts(package="torch_geometric", evaluated=("val_accuracy",)),
    "hydra_template": Facts(package="hydra", schedule="ReduceLROnPlateau per epoch", evaluated=("val/loss", "val/acc")),
    "image_classifier": Facts(
        package="torch_uncertainty",
        schedule="MultiStepLR per epoch",
        evaluated=("val/cls/Acc", "val/cal/ECE", "val/cls/NLL"),
    ),
    "land_cover": Facts(
        package="torchgeo", schedule="ReduceLROnPlateau per epoch", evaluated=("val_loss", "val_MulticlassJaccardIndex")
    ),
    "language_model": Facts(package="requests"),
    "lora": Facts(package="peft", evaluated=("val_loss", "val_acc")),
    "medical": Facts(package="monai", tree="pytorch_lightning", evaluated=("val_dice", "val_loss")),
    "molecules": Facts(package="chemprop", schedule="Noam per step", evaluated=("val/rmse", "val/mae", "val_loss")),
    "recommender": Facts(package="torch_rechub", evaluated=("val_auroc",)),
    "segmentation": Facts(
        package="segmentation_models_pytorch",
        schedule="CosineAnnealingLR per step",
        evaluated=("valid_per_image_iou", "valid_dataset_iou"),
    ),
    "series": Facts(package="darts", tree="pytorch_lightning", schedule="ExponentialLR per epoch"),
    "simclr": Facts(package="lightly", tree="pytorch_lightning"),
    "single_cells": Facts(
        package="scvi",
        schedule="ReduceLROnPlateau per epoch",
        evaluated=("validation_loss",),
        differs={
            "kl_weight": "a value per step: of a client's steps, the last one is logged",
            "validation": "validation draws latent variables",
        },
        sequential="worker processes would not see what SaveCheckpoint does between two clients",
    ),
    "survival": Facts(
        package="torchsurv",
        evaluated=("val_concordance",),
        undefined={"val_concordance": "All samples are censored"},  # of the hospital without events
    ),
    "tabular": Facts(package="pytorch_tabular", tree="pytorch_lightning", schedule="ExponentialLR per epoch"),
    "time_series": Facts(package="pytorch_forecasting", schedule="ReduceLROnPlateau per epoch"),
    "timm_classifier": Facts(package="timm", schedule="CosineLRScheduler per epoch", evaluated=("val_loss", "val_acc")),
}
"""In alphabetical order."""
