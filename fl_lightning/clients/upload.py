# SPDX-License-Identifier: Apache-2.0
"""What one client sends to the server at the end of its local training."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fl_lightning.algorithms.records import ClientReport
from fl_lightning.clients.buffers import BufferReport
from fl_lightning.clients.module_visits import Left
from fl_lightning.clients.schedules import Pace


@dataclass(frozen=True)
class Upload:
    """One client's report as it reached the server."""

    index: int  # its row in the update matrix
    client_id: int
    size: int  # training samples
    train_loss: Tensor | None  # mean over local training, if the module reported one
    loss: float | None  # at the global parameters before training, if asked for
    report: ClientReport
    buffers: BufferReport
    client_lr: float | None = None  # mean of its steps, if its optimizer defines one
    pace: Pace = field(default_factory=Pace)  # what its visit counted
    planned: int = 0  # steps whose gradients came from plans
    skipped: int = 0  # batches without a loss, with automatic optimization
    left: Left = field(default_factory=Left)  # in the module beside parameters and buffers


def with_accuracy(report: ClientReport, accuracy: float, module: object) -> ClientReport:
    """Adds what the module says about its accuracy to what the client rule sends."""
    if not 0 <= accuracy <= 1:
        name = type(module).__name__
        raise ValueError(f"{name}.federated_accuracy must return a share between 0 and 1, found {accuracy}")
    return replace(report, extras={**report.extras, "accuracy": torch.tensor(accuracy, dtype=torch.float64)})
