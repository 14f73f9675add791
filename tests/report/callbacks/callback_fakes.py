# SPDX-License-Identifier: Apache-2.0
"""A trainer, as far as the monitors look at one, and records to feed it."""

from types import SimpleNamespace

import torch

from fl_lightning.core.records import EvaluationRecord
from fl_lightning.lightning.names import TrainerFn


def fake_trainer(**changes):
    fields = {
        "strategy": SimpleNamespace(last_round=None, last_evaluation=None),
        "state": SimpleNamespace(fn=TrainerFn.FITTING),
        "sanity_checking": False,
        "ckpt_path": None,
        "current_epoch": 0,
        "fast_dev_run": False,
        "is_global_zero": True,
        "loggers": [],
        "log_dir": None,
        "printed": [],
    }
    trainer = SimpleNamespace(**{**fields, **changes})
    trainer.print = trainer.printed.append
    return trainer


def evaluation_record(round_index, stage="val", ids=(0, 1, 2), sizes=(10, 20, 30), **values):
    values = values or {f"{stage}_acc": [0.5, 0.75, 1.0], f"{stage}_loss": [1.5, 1.0, 0.25]}
    tensors = {name: torch.tensor(v, dtype=torch.float64) for name, v in values.items()}
    return EvaluationRecord(round_index, stage, tuple(ids), torch.tensor(sizes, dtype=torch.int64), tensors)


def validate(callback, trainer, record):
    trainer.strategy.last_evaluation = record
    callback.on_validation_end(trainer, None)
