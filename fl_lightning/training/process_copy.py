# SPDX-License-Identifier: Apache-2.0
"""Messages between a fit and its copy in another process: what a round needs, and what a client leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms.base import State
from fl_lightning.core.lightning.fast_log import LogCall
from fl_lightning.core.lightning.process_copy import Counts


@dataclass(frozen=True)
class RoundState:
    """Where a fit is when a client of a round is about to train; the global parameters travel apart.

    Attributes:
        counters: of the epoch loop.
        buffers: the module's global buffers.
        optimizer_options: of the client optimizers, per optimizer and parameter group.
        schedulers: states of the learning-rate schedulers.
        lr: the clients' learning rate, if the optimizer defines one.
        momentum: of the clients' SGD.
    """

    counters: dict[str, Any]
    buffers: tuple[dict[tuple[torch.dtype, torch.device], Tensor], list[Tensor]]
    optimizer_options: list[list[dict[str, Any]]]
    schedulers: list[dict[str, Any]]
    lr: float | None
    momentum: float


@dataclass(frozen=True)
class ClientTraces:
    """What a client's training leaves behind beside its upload.

    Attributes:
        counters: by how much the loop's counters moved.
        logged: its calls of ``self.log``.
        rule: what the client rule needs for its commit.
        optimizers: optimizer states to keep.
    """

    counters: Counts = field(default_factory=list)
    logged: list[LogCall] = field(default_factory=list)
    rule: State | None = None
    optimizers: list[dict[str, Any]] | None = None
