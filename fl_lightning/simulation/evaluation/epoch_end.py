# SPDX-License-Identifier: Apache-2.0
"""Each client's values of what a module computes only when an evaluation ends.

Many projects update metrics, or append to a list, in ``validation_step`` and log in ``on_validation_epoch_end``. That
hook is run once more for every client, with what this client's batches have left behind and nothing else, and with
nobody listening but the client's row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torchmetrics import Metric

from fl_lightning.core.lightning.inspection import is_overridden
from fl_lightning.core.lightning.metric_state import MetricState, is_mergeable
from fl_lightning.core.lightning.names import DummyLogger, LightningModule, Trainer, rank_zero_warn
from fl_lightning.core.model_snapshot import buffers_kept
from fl_lightning.core.module_state import ModuleState, refill, shadowed
from fl_lightning.simulation.evaluation.recorded_logs import RecordedLogs

_HOOKS = {"val": "on_validation_epoch_end", "test": "on_test_epoch_end"}


class EpochEnd:
    """Runs the module's epoch-end hook for one client at a time.

    Afterwards metrics, buffers, lists and other plain attributes are as they were. ``self.log`` fills the client's row,
    loggers and ``print`` are silent, and a hook that steps optimizers or schedulers ends there. Metrics whose states
    cannot be joined give NaN.

    Args:
        module: the module.
        trainer: its trainer.
        name: the hook's name.
    """

    def __init__(self, module: LightningModule, trainer: Trainer, name: str) -> None:
        self._module, self._trainer, self._name = module, trainer, name
        metrics = [m for m in module.modules() if isinstance(m, Metric)]
        inner = {id(part) for metric in metrics for part in metric.modules() if part is not metric}
        self._metrics = [metric for metric in metrics if id(metric) not in inner]  # a wrapper sees to its own
        self._aside: list[tuple[Metric, MetricState]] = []
        self._lengths: dict[int, int] = {}
        self._failed = False

    @classmethod
    def of(cls, trainer: Trainer, stage: str) -> EpochEnd | None:
        """What the running evaluation needs; ``None`` where the module has no such hook, or in the sanity check."""
        module, name = trainer.lightning_module, _HOOKS[stage]
        return cls(module, trainer, name) if is_overridden(name, module) and not trainer.sanity_checking else None

    def begin(self) -> None:
        """Called before a client's first batch: what was gathered so far is put aside."""
        self._aside = [(m, MetricState(m)) for m in self._metrics if m._update_count > 0 and is_mergeable(m)]
        for _, state in self._aside:
            state.reset()
        self._lengths = {id(items): len(items) for items in ModuleState(self._module).sequences()}

    def values(self) -> dict[str, float]:
        """Called after a client's last batch: what the hook logs about this client alone."""
        notes = RecordedLogs()
        notes.size = 1
        state = ModuleState(self._module)
        try:
            for items in state.sequences():
                before = self._lengths.get(id(items), 0)
                if len(items) > before:  # others are no collections of outputs
                    refill(items, list(items)[before:])
            with self._unheard(notes), buffers_kept(self._module):
                getattr(self._module, self._name)()
        except Exception as error:
            if not self._failed:
                rank_zero_warn(
                    f"{type(self._module).__name__}.{self._name} does not run for a client alone "
                    f"({type(error).__name__}: {error}): no client has values of what it logs after that"
                )
            self._failed = True
        finally:
            found = notes.values()
            state.restore()
        return found

    def end(self) -> None:
        """Joins what was put aside with what has been gathered since."""
        for metric, state in self._aside:
            if metric._update_count > 0:
                state.merge_back()
            else:
                state.put_back()
        self._aside = []

    @contextmanager
    def _unheard(self, notes: RecordedLogs) -> Iterator[None]:
        trainer = self._trainer
        loggers = trainer.loggers
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(StringIO()))
            stack.enter_context(
                shadowed(
                    self._module, log=notes.log, log_dict=notes.log_dict, optimizers=_refuse, lr_schedulers=_refuse
                )
            )
            for metric in self._metrics:
                if not is_mergeable(metric):
                    stack.enter_context(shadowed(metric, compute=_nan))
            trainer.loggers = [DummyLogger()] if loggers else []
            try:
                yield
            finally:
                trainer.loggers = loggers


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("optimizers and schedulers step once per evaluation, not once per client")


def _nan() -> torch.Tensor:
    return torch.tensor(torch.nan)
