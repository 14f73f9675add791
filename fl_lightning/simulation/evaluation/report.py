# SPDX-License-Identifier: Apache-2.0
"""What users see of an evaluation: logged numbers, the angle in the progress bar, a warning, a table."""

from __future__ import annotations

from fl_lightning.callbacks.client_table import ClientTable, format_client_table
from fl_lightning.core.lightning.logged_values import send_to_loggers, show_in_progress_bar
from fl_lightning.core.lightning.names import Callback, Trainer, rank_zero_warn
from fl_lightning.core.records import EvaluationRecord
from fl_lightning.simulation.evaluation.summary import client_metrics, evaluation_metrics, shown_angle

_MANY_CLIENTS = 200


class EvaluationReport:
    """Logs and prints how evenly the clients fare.

    Args:
        metric: the metric whose direction and angle are of interest; ``None``: see :func:`shown_angle`.
        larger_is_better: the direction of ``metric``.
    """

    def __init__(self, metric: str | None, larger_is_better: bool) -> None:
        self._metric, self._larger_is_better, self._looked_for = metric, larger_is_better, False

    def log(self, record: EvaluationRecord, trainer: Trainer, callback: Callback) -> None:
        """Logs the summary, the clients' values, and the angle for the progress bar.

        Args:
            record: the evaluation.
            trainer: the trainer.
            callback: whose hook runs: the summary goes through its ``log``.
        """
        self._look_for_metric(record)
        metrics = evaluation_metrics(record, self._metric, self._larger_is_better)
        for name, value in metrics.items():
            callback.log(name, value)  # type: ignore[attr-defined]
        if len(record.client_ids) <= _MANY_CLIENTS:
            send_to_loggers(trainer, client_metrics(record))
        angle = shown_angle(record, metrics, self._metric)
        if angle is not None:
            show_in_progress_bar(trainer, {"angle": angle})

    def _look_for_metric(self, record: EvaluationRecord) -> None:
        """Warns in the first validation if nobody logs ``fairness_metric``."""
        if self._metric is None or self._looked_for or record.stage != "val":
            return
        self._looked_for = True
        if self._metric not in record.values:
            rank_zero_warn(
                f"fairness_metric must be a metric that validation logs per client, found {self._metric!r}: the "
                f"progress bar shows no angle; there are {', '.join(map(repr, record.values)) or 'none'}"
            )

    def print_table(self, record: EvaluationRecord, trainer: Trainer) -> None:
        """Prints the clients' values, unless a ClientTable callback does."""
        if not any(isinstance(callback, ClientTable) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            larger = {} if self._metric is None else {self._metric: self._larger_is_better}
            trainer.print(format_client_table(record, larger_is_better=larger))
