# SPDX-License-Identifier: Apache-2.0
"""What the monitors ask of a trainer."""

from __future__ import annotations

from typing import Protocol, cast

from fl_lightning.core.records import EvaluationRecord, RoundRecord
from fl_lightning.lightning.names import Callback, Trainer, TrainerFn


class FederatedRecords(Protocol):
    """The part of a federated strategy that monitors read."""

    last_round: RoundRecord | None
    last_evaluation: EvaluationRecord | None


def records(trainer: Trainer, callback: Callback) -> FederatedRecords:
    """The records of the trainer's strategy.

    Raises:
        ValueError: the strategy is not a federated one.
    """
    strategy = trainer.strategy
    if not hasattr(strategy, "last_round"):
        raise ValueError(
            f"{type(callback).__name__} needs Trainer(strategy=FederatedStrategy(...)), "
            f"found strategy {type(strategy).__name__}"
        )
    return cast(FederatedRecords, strategy)


def evaluation(trainer: Trainer, callback: Callback, stage: str) -> EvaluationRecord | None:
    """The evaluation that just ended, or ``None`` for a sanity check and for one without per-client values."""
    record = records(trainer, callback).last_evaluation
    if trainer.sanity_checking or record is None or record.stage != stage:
        return None
    return record


def is_fitting(trainer: Trainer) -> bool:
    """Whether ``trainer.fit`` runs; validation inside it included, ``trainer.validate`` not."""
    return trainer.state.fn == TrainerFn.FITTING


def is_fresh_fit(trainer: Trainer) -> bool:
    """Whether the fit that starts continues nothing: neither a checkpoint nor an earlier fit of this trainer."""
    return trainer.ckpt_path is None and trainer.current_epoch == 0
