# SPDX-License-Identifier: Apache-2.0
"""Evaluates one model on every client's data, in an order that lets each client's values be told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fl_lightning.callbacks.client_table import ClientTable, format_client_table
from fl_lightning.core.lightning.logged_values import active_results, send_to_loggers
from fl_lightning.core.lightning.names import Callback, Trainer, rank_zero_warn
from fl_lightning.core.records import EvaluationRecord
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.simulation.evaluation.client_values import ClientEvaluation
from fl_lightning.simulation.evaluation.epoch_end import EpochEnd
from fl_lightning.simulation.evaluation.loader import EvaluationLoader
from fl_lightning.simulation.evaluation.personal import PersonalEvaluation
from fl_lightning.simulation.evaluation.summary import client_metrics, evaluation_metrics, shown_angle

_MANY_CLIENTS = 200


class Evaluator:
    """Watches validations and tests client by client, and logs how evenly the clients fare.

    Args:
        metric: the metric whose direction and angle are of interest; ``None``: see :func:`shown_angle`.
        larger_is_better: the direction of ``metric``.

    Attributes:
        record: the last finished evaluation.
    """

    def __init__(self, metric: str | None, larger_is_better: bool) -> None:
        self._metric, self._larger_is_better, self._looked_for = metric, larger_is_better, False
        self._loaders: dict[str, EvaluationLoader] = {}
        self._running: ClientEvaluation | None = None
        self.record: EvaluationRecord | None = None

    def loader(self, stage: str, loaders: ClientLoaders, limit: int | float) -> EvaluationLoader:
        """Walks over the clients' data of a stage and remembers that it does."""
        self._loaders[stage] = EvaluationLoader(loaders, limit)
        return self._loaders[stage]

    def forget_loaders(self) -> None:
        """The trainer function is over."""
        self._loaders = {}

    def begin(
        self, trainer: Trainer, stage: str, rounds: int, personal: Callable[[], PersonalEvaluation] | None = None
    ) -> None:
        """Starts to collect if the stage's data is divided among clients.

        Args:
            trainer: the trainer.
            stage: ``"val"`` or ``"test"``.
            rounds: rounds finished.
            personal: makes what evaluates clients' own models as well.
        """
        loader = self._loaders.get(stage)
        if loader is not None:
            own = None if personal is None or trainer.sanity_checking else personal()
            ending = EpochEnd.of(trainer, stage)
            self._running = ClientEvaluation(loader, active_results(trainer), stage, rounds, own, ending)
        elif not trainer.sanity_checking:
            self.record = None  # nobody may take an earlier one for this one's

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Around the module's step on one batch."""
        if self._running is not None:
            self._running.before_step()
        yield
        if self._running is not None:
            self._running.after_step()

    def end(self, trainer: Trainer, callback: Callback) -> float | None:
        """Logs what was collected, unless this was the sanity check; returns the angle for the progress bar."""
        if self._running is None or trainer.sanity_checking:
            return None
        self.record = record = self._running.record()
        self._look_for_metric(record)
        metrics = evaluation_metrics(record, self._metric, self._larger_is_better)
        for name, value in metrics.items():
            callback.log(name, value)  # type: ignore[attr-defined]
        if len(record.client_ids) <= _MANY_CLIENTS:
            send_to_loggers(trainer, client_metrics(record))
        return shown_angle(record, metrics, self._metric)

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

    def stop(self) -> None:
        """The evaluation is over, or was cut short."""
        self._running = None

    def print_table(self, trainer: Trainer) -> None:
        """Prints the per-client table of the last test, unless a ClientTable callback does."""
        tables = [c for c in trainer.callbacks if isinstance(c, ClientTable)]  # type: ignore[attr-defined]
        if self.record is not None and self.record.stage == "test" and not tables:
            larger = {} if self._metric is None else {self._metric: self._larger_is_better}
            trainer.print(format_client_table(self.record, larger_is_better=larger))
