# SPDX-License-Identifier: Apache-2.0
"""Fair federated learning for PyTorch Lightning."""

from fl_lightning import algorithms, attacks, callbacks, data, executors, metrics, models, ops, optim, solvers
from fl_lightning.checkpoint import newest_checkpoint
from fl_lightning.client import ClientModule
from fl_lightning.cohort import Cohort
from fl_lightning.data import FederatedDataModule
from fl_lightning.records import EvaluationRecord, RoundRecord
from fl_lightning.reports import ClientError
from fl_lightning.strategy import FederatedStrategy
from fl_lightning.updates import ParamLayout, UpdateMatrix
from fl_lightning.versions import __version__, show_versions

__all__ = [
    "ClientError",
    "ClientModule",
    "Cohort",
    "EvaluationRecord",
    "FederatedDataModule",
    "FederatedStrategy",
    "ParamLayout",
    "RoundRecord",
    "UpdateMatrix",
    "__version__",
    "algorithms",
    "attacks",
    "callbacks",
    "data",
    "executors",
    "metrics",
    "models",
    "newest_checkpoint",
    "ops",
    "optim",
    "show_versions",
    "solvers",
]
