# SPDX-License-Identifier: Apache-2.0
"""What callbacks ask of a trainer."""

from __future__ import annotations

from typing import Any

from fl_lightning.core.records import EvaluationRecord
from fl_lightning.lightning.names import Callback, Trainer, TrainerFn


def federated_strategy(trainer: Trainer, callback: Callback) -> Any:
    """The trainer's strategy, which has ``last_round`` and ``last_evaluation``."""
    strategy = trainer.strategy
    if not hasattr(strategy, "last_round"):
        raise ValueError(
            f"{type(callback).__name__} needs Trainer(strategy=FederatedStrategy(...)), "
            f"found strategy {type(strategy).__name__}"
        )
    return strategy


def evaluation(trainer: Trainer, callback: Callback, stage: str) -> EvaluationRecord | None:
    """The evaluation that just ended, or ``None`` for a sanity check and for one without per-client values."""
    record: EvaluationRecord | None = federated_strategy(trainer, callback).last_evaluation
    return None if trainer.sanity_checking or record is None or record.stage != stage else record


def is_fitting(trainer: Trainer) -> bool:
    """Whether ``trainer.fit`` runs; validation inside it included, ``trainer.validate`` not."""
    return trainer.state.fn == TrainerFn.FITTING


def is_fresh_fit(trainer: Trainer) -> bool:
    """Whether the fit that starts continues nothing: neither a checkpoint nor an earlier fit of this trainer."""
    return trainer.ckpt_path is None and trainer.current_epoch == 0
