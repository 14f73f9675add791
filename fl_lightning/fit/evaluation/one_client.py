# SPDX-License-Identifier: Apache-2.0
"""Runs a module's evaluation for one client alone, without a trace in the fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

from torchmetrics import Metric

from fl_lightning.core.modules import modes_kept, named_metrics, submodules
from fl_lightning.fit.evaluation.loader import OwnBatches
from fl_lightning.fit.evaluation.recorded_logs import RecordedLogs
from fl_lightning.lightning.batches import batch_size, device_batch
from fl_lightning.lightning.evaluation_batches import counted_batches
from fl_lightning.lightning.inspection import is_overridden, takes_batch_index
from fl_lightning.lightning.logged_values import shown_metrics
from fl_lightning.lightning.module.logged_row import LoggedRow
from fl_lightning.lightning.module.shadowed import shadowed
from fl_lightning.lightning.module.undefined_metrics import Noticed, missing_classes
from fl_lightning.lightning.names import DummyLogger, LightningModule, Trainer

_STAGES = {"val": "validation", "test": "test"}


class Alone:
    """Runs steps and hooks of the module as if one client were all there is.

    ``self.log`` fills the client's row, loggers and ``print`` are silent, and a hook that steps optimizers or
    schedulers ends there. The caller sees to what the module holds before and afterwards.
    """

    def __init__(self, trainer: Trainer, stage: str, noticed: Noticed) -> None:
        self._trainer, self._noticed = trainer, noticed
        self.module: LightningModule = trainer.lightning_module
        word = _STAGES[stage]
        self._start, self._end = f"on_{word}_batch_start", f"on_{word}_batch_end"
        self.hook = f"on_{word}_epoch_end"
        self.has_hook = is_overridden(self.hook, self.module)
        self.step_name = f"{word}_step"
        self._step = getattr(self.module, self.step_name)
        self._takes_index = takes_batch_index(self._step)

    def steps(self, loaders: Sequence[OwnBatches], mode: AbstractContextManager[None] | None = None) -> LoggedRow:
        """What the module logs about a client whose batches are all that it sees.

        Returns:
            What it logs; nothing but the error if a step raises, and what came before if the hook does.
        """
        row = LoggedRow()
        with mode or nullcontext(), counted_batches(self._trainer, [own.number for own in loaders]):
            for own in loaders:
                notes = RecordedLogs(self._noticed, own.loader)
                with self._unheard(notes):
                    try:
                        for index, (batch, _) in enumerate(own.batches):
                            self._one(notes, batch, index, own.loader)
                    except Exception as error:
                        return LoggedRow(error=error)
                    row.update(notes.row())  # Lightning, too, computes metrics once a loader is over
            return self.end(row) if self.has_hook else row

    def one_step(self, batch: Any) -> LoggedRow:
        """What one evaluation step logs; the module must be prepared for it.

        Raises:
            Exception: the module's own.
        """
        notes = RecordedLogs(self._noticed)
        with self._unheard(notes):
            self._one(notes, batch, 0)
            return notes.row()

    def _one(self, notes: RecordedLogs, batch: Any, index: int, loader: int | None = None) -> None:
        """One evaluation step with the module's own batch hooks around it."""
        module, trainer = self.module, self._trainer
        told = () if loader is None else (loader,)
        batch = device_batch(trainer, batch, loader or 0)
        notes.size = partial(batch_size, batch)
        with self._noticed.apart():
            getattr(module, self._start)(batch, index, *told)
            with trainer.precision_plugin.val_step_context():
                output = self._step(batch, *((index,) if self._takes_index else ()), *told)
            getattr(module, self._end)(output, batch, index, *told)

    def end(self, row: LoggedRow) -> LoggedRow:
        """Runs the epoch-end hook for a client.

        Returns:
            The same, and what the hook logs until it ends or raises; then the row holds the error.
        """
        notes = RecordedLogs(self._noticed)
        error = None
        with self._unheard(notes), shown_metrics(self._trainer, row.values), self._noticed.apart():
            try:
                getattr(self.module, self.hook)()
            except Exception as raised:
                error = raised
            found = notes.row()
        found.update(row)
        found.error = error
        return found

    @contextmanager
    def _unheard(self, notes: RecordedLogs) -> Iterator[None]:
        trainer = self._trainer
        loggers = trainer.loggers
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(StringIO()))
            stack.enter_context(modes_kept(submodules(self.module)))
            stack.enter_context(
                shadowed(self.module, log=notes.log, log_dict=notes.log_dict, optimizers=_refuse, lr_schedulers=_refuse)
            )
            for _, metric in named_metrics(self.module):
                stack.enter_context(self._judged(metric, notes))
            trainer.loggers = [DummyLogger()] if loggers else []
            try:
                yield
            finally:
                trainer.loggers = loggers

    @contextmanager
    def _judged(self, metric: Metric, notes: RecordedLogs) -> Iterator[None]:
        """``compute`` gives NaN where the metric is undefined; a batch's own value in ``forward`` is nobody's value."""
        own_compute, own_forward = metric.compute, metric.forward

        def compute() -> Any:
            value, reason = self._noticed.computed(metric, own_compute)
            notes.came_from(value, metric, reason)
            return value

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._noticed.apart() as reasons:

                def of_batch() -> Any:
                    reasons.extend(missing_classes(metric))
                    return own_compute()

                with shadowed(metric, compute=of_batch):
                    value = own_forward(*args, **kwargs)
            notes.came_from(value, metric, reasons[0] if reasons else None)
            return value

        with shadowed(metric, compute=compute, forward=forward):
            yield


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("optimizers and schedulers step once per evaluation, not once per client")
