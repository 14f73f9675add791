# SPDX-License-Identifier: Apache-2.0
"""What ``training_step`` logs by step, where loggers hear of few steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_lightning.lightning.names import Trainer, rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection


class StepValues:
    """Warns once of values that most rounds keep from loggers, in place of Lightning's warning of short epochs."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._told = trainer, False

    def warn(self, results: _ResultCollection) -> None:
        """Looks at what the clients of a round have logged."""
        trainer = self._trainer
        every, places = trainer.log_every_n_steps, trainer.fit_loop.max_batches  # type: ignore[attr-defined]
        if self._told or not trainer.loggers or places >= every or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        metas = [entry.meta for entry in results.values()]
        names = sorted({meta.name for meta in metas if meta.on_step and not meta.on_epoch and meta.logger})
        if not names:
            return
        self._told = True
        rank_zero_warn(
            f"log_every_n_steps={every} counts clients, of which a round has {places}: loggers get {', '.join(names)} "
            f"from one in {every} of them. Log with on_epoch=True, or set log_every_n_steps={places} or lower"
        )
