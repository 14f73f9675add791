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
        evaluated: metrics that its last evaluation has for every client.
        differs: what one client does not share bit for bit with the project as it was, and why. Keys are regular
            expressions of logged names, or ``"weights"``.
        sequential: the reason why ``Parallel`` trains its clients sequentially; ``None`` if it does not.
    """

    package: str = "lightning"
    tree: str = "lightning.pytorch"
    schedule: str | None = None
    evaluated: tuple[str, ...] = ()
    differs: Mapping[str, str] = field(default_factory=dict)
    sequential: str | None = None


PROJECTS = {
    "boring": Facts(schedule="StepLR per epoch"),
    "graphs": Facts(
        package="torch_geometric",
        evaluated=("test_accuracy",),
        sequential="GraphClassifier logs the metric object 'train_accuracy'",
    ),
    "image_classifier": Facts(
        package="torch_uncertainty",
        schedule="MultiStepLR per epoch",
        evaluated=("test/cls/Acc", "test/cal/ECE", "test/cls/NLL"),
    ),
    "land_cover": Facts(
        package="torchgeo",
        schedule="ReduceLROnPlateau per epoch",
        evaluated=("val_loss", "val_MulticlassJaccardIndex"),
    ),
    "language_model": Facts(package="requests"),
    "tabular": Facts(package="pytorch_tabular", tree="pytorch_lightning", schedule="ExponentialLR per epoch"),
    "time_series": Facts(package="pytorch_forecasting", schedule="ReduceLROnPlateau per epoch"),
}
"""In alphabetical order."""
