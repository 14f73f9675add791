# SPDX-License-Identifier: Apache-2.0
"""Fair federated learning for PyTorch Lightning."""

from fl_lightning import (  # isort: skip
    algorithms, attacks, callbacks, data, executors, guards, metrics, ops, optim, report, solvers, testing,
)  # fmt: skip
from fl_lightning.client_module import ClientModule
from fl_lightning.comparison import Audit, Comparison, audit, compare
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.errors import ClientError
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.records import EvaluationRecord, RoundRecord
from fl_lightning.core.updates import UpdateMatrix
from fl_lightning.data import FederatedDataModule
from fl_lightning.federation.federated_client import FederatedClient
from fl_lightning.federation.federated_server import FederatedServer
from fl_lightning.federation.messages import ClientIntroduction, ClientMessage, ServerMessage
from fl_lightning.fit.strategy import FederatedStrategy
from fl_lightning.lightning.checkpoint_io import newest_checkpoint
from fl_lightning.lightning.fit_description import FitDescription
from fl_lightning.lightning.versions import __version__, show_versions

__all__ = [
    "Audit",
    "ClientError",
    "ClientIntroduction",
    "ClientMessage",
    "ClientModule",
    "Cohort",
    "Comparison",
    "EvaluationRecord",
    "FederatedClient",
    "FederatedDataModule",
    "FederatedServer",
    "FederatedStrategy",
    "FitDescription",
    "ParamLayout",
    "RoundRecord",
    "ServerMessage",
    "UpdateMatrix",
    "__version__",
    "algorithms",
    "attacks",
    "audit",
    "callbacks",
    "compare",
    "data",
    "executors",
    "guards",
    "metrics",
    "newest_checkpoint",
    "ops",
    "optim",
    "report",
    "show_versions",
    "solvers",
    "testing",
]
