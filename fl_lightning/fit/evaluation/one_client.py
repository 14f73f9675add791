# SPDX-License-Identifier: Apache-2.0
"""Runs a module's evaluation for one client alone, without a trace in the fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.clients.client_optimizers import group_options
from fl_lightning.core.modules import modes_kept, submodules
from fl_lightning.fit.loaders import OwnBatches
from fl_lightning.lightning.batches import batch_size, counted_batches, device_batch
from fl_lightning.lightning.inspection import is_overridden, takes_batch_index
from fl_lightning.lightning.logged_values import LoggedRow, shown_metrics
from fl_lightning.lightning.metric_state import in_forward
from fl_lightning.lightning.module.object_state import shadowed
from fl_lightning.lightning.module.undefined_metrics import Noticed
from fl_lightning.lightning.names import DummyLogger, LightningModule, Trainer

_STAGES = {"val": "validation", "test": "test"}
_KINDS: Mapping[Any, str] = {
    torch.mean: "mean", "avg": "mean", torch.sum: "sum", sum: "sum", torch.max: "max", max: "max", torch.min: "min",
    min: "min",
}  # fmt: skip


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
        self.metrics: Collection[Metric] = ()  # of the module, those in its containers included

    def steps(self, loaders: Sequence[OwnBatches], mode: AbstractContextManager[None] | None = None) -> LoggedRow:
        """What the module logs about a client whose batches are all that it sees.

        If a step raises, that is nothing but the error, and if the hook does, what came before.
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
        """What one evaluation step logs; the module must be prepared for it."""
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
        """Runs the epoch-end hook for a client; adds what it logs until it ends or raises, and the error."""
        notes = RecordedLogs(self._noticed, of_steps=False)
        error = None
        groups = [(group, group_options(group)) for each in self._trainer.optimizers for group in each.param_groups]
        with self._unheard(notes), shown_metrics(self._trainer, row.values), self._noticed.apart():
            try:
                getattr(self.module, self.hook)()
            except Exception as raised:
                error = raised
            found = notes.row()
        for group, options in groups:  # rates that the hook sets move once per evaluation, not once per client
            group.update(options)
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
            for metric in [part for held in self.metrics for _, part in submodules(held) if isinstance(part, Metric)]:
                stack.enter_context(self._judged(metric, notes))
            trainer.loggers = [DummyLogger()] if loggers else []
            try:
                yield
            finally:
                trainer.loggers = loggers

    @contextmanager
    def _judged(self, metric: Metric, notes: RecordedLogs) -> Iterator[None]:
        """``compute``, which ``forward`` calls for a batch's value, gives NaN where the metric is undefined."""
        own = metric.compute

        def compute() -> Any:
            value, reason = self._noticed.computed(metric, own, notes.of_steps and in_forward(metric))
            notes.came_from(value, metric, reason)
            return value

        with shadowed(metric, compute=compute):
            yield


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("optimizers and schedulers step once per evaluation, not once per client")


class RecordedLogs:
    """``self.log`` that adds up a client's values: means by samples, sums, largest, smallest, and metrics.

    ``loader`` is the number of the loader that is being walked, which Lightning adds to names; ``None``: there is one.
    ``size`` gives how much the next values weigh, where the module does not say it.
    """

    def __init__(self, noticed: Noticed, loader: int | None = None, of_steps: bool = True) -> None:
        self.of_steps = of_steps
        self.size: Callable[[], float] = _one
        self._noticed, self._loader = noticed, loader
        self._numbers: dict[str, tuple[str, list[Tensor], list[float]]] = {}
        self._undefined: dict[str, str] = {}
        self._metrics: dict[str, Metric] = {}
        self._computed: dict[int, tuple[Any, Metric, str | None]] = {}
        self._sources: dict[str, Metric] = {}

    def came_from(self, value: Any, metric: Metric, reason: str | None) -> None:
        """Remembers which metric has computed a value that may be logged later, and why it is undefined, if it is."""
        for item in value.values() if isinstance(value, dict) else (value,):
            self._computed[id(item)] = (item, metric, reason)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log`."""
        if kwargs.get("on_epoch") is False:
            return
        if self._loader is not None and kwargs.get("add_dataloader_idx", True):
            name = f"{name}/dataloader_idx_{self._loader}"
        if isinstance(value, Metric):
            self._metrics[name] = value
        elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            reduction = kwargs.get("reduce_fx", "mean")
            kind = _KINDS.get(reduction, reduction)
            _, values, weights = self._numbers.setdefault(name, (str(kind), [], []))
            values.append(_number(value))
            weights.append(float(kwargs.get("batch_size") or self.size()))
            _, metric, reason = self._computed.get(id(value), (None, None, None))
            if metric is not None:
                self._sources[name] = metric
            # A function that has warned may have given this value or another one: none of them is to be trusted.
            reason = reason or next(iter(self._noticed.reasons), None)
            if reason is not None:
                self._undefined[name] = reason

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log_dict`."""
        for name, value in dictionary.items():
            self.log(name, value, **kwargs)

    def row(self) -> LoggedRow:
        """What was logged, one number per name."""
        row = LoggedRow()
        for name, (kind, values, weights) in self._numbers.items():
            if kind == "mean":
                total = sum((v * w for v, w in zip(values, weights, strict=True)), torch.zeros_like(values[0]))
                number = total / sum(weights)
            elif kind == "sum":
                number = sum(values, torch.zeros_like(values[0]))
            elif kind in ("max", "min"):
                number = max(values) if kind == "max" else min(values)
            else:
                continue
            row.add(name, float(number), self._undefined.get(name))
            row.note(name, self._sources.get(name))
        for name, metric in self._metrics.items():
            computed, reason = self._noticed.computed(metric)
            reason = reason or self._computed.get(id(computed), (None, None, None))[2]
            if isinstance(computed, Tensor) and computed.numel() == 1:
                row.add(name, float(computed), reason)
                row.note(name, metric)
        return row


def _number(value: Any) -> Tensor:
    """In the precision in which Lightning adds up."""
    number = torch.as_tensor(value).detach().clone().reshape(())  # a buffer of the module may change later
    return number if isinstance(value, Tensor) and value.is_floating_point() else number.to(torch.get_default_dtype())


def _one() -> float:
    return 1.0
