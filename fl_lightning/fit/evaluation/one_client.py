# SPDX-License-Identifier: Apache-2.0
"""Runs a module's evaluation for one client alone, without a trace in the fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

from fl_lightning.clients.client_optimizers import group_options
from fl_lightning.core.modules import preserve_modes, submodules
from fl_lightning.fit.loaders import EvaluationLoader, counts_of
from fl_lightning.lightning.batches import counted_batches, run_batch, run_hook
from fl_lightning.lightning.logged_values import ClientValues, LoggedRow, active_results, collecting
from fl_lightning.lightning.module.snapshot import shadowed
from fl_lightning.lightning.module.undefined_metrics import LogNotes
from fl_lightning.lightning.names import DummyLogger, LightningModule, Trainer


class Alone:
    """Runs steps and hooks of the module as if one client were all there is.

    Loggers and ``print`` are silent, and a hook that steps optimizers or schedulers ends there. The caller sees to what
    the module holds before and afterwards.
    """

    def __init__(
        self, trainer: Trainer, stage: str, notes: LogNotes, loaders: Sequence[EvaluationLoader | None]
    ) -> None:
        self._trainer, self._stage, self._notes, self._loaders = trainer, stage, notes, loaders
        self._module: LightningModule = trainer.lightning_module
        self._values = ClientValues(type(active_results(trainer))(training=False))

    def steps(self, client_id: int) -> LoggedRow:
        """What the module logs in all of a client's batches."""
        row, results = LoggedRow(), self._values.results
        counts = counts_of(self._loaders, client_id)
        with (
            self._unheard(),
            collecting(self._trainer, results, {}, in_steps=True),
            self._notes.listening(judges=False),
        ):
            for place, own in enumerate(self._loaders):
                results.dataloader_idx = place if len(self._loaders) > 1 else None
                self._values.clear()
                for index, (batch, _) in enumerate(
                    own.of_client(client_id) if own is not None and counts[place] else ()
                ):
                    self._notes.next_batch()
                    run_batch(self._trainer, self._stage, batch, index)
                self._values.read(self._notes, row)  # Lightning, too, computes metrics once a loader is over
        results.dataloader_idx = None
        return row

    def end(self, client_id: int, row: LoggedRow) -> LoggedRow:
        """Runs the epoch-end hook for a client; adds what it logs until it ends or raises, and the error."""
        found, results = LoggedRow(), self._values.results
        groups = [(group, group_options(group)) for each in self._trainer.optimizers for group in each.param_groups]
        self._values.clear()
        with (
            self._unheard(), collecting(self._trainer, results, row.values, in_steps=False),
            self._notes.listening(judges=True), counted_batches(self._trainer, counts_of(self._loaders, client_id)),
        ):  # fmt: skip
            try:
                run_hook(self._trainer, f"on_{self._stage}_epoch_end")
            except Exception as raised:
                found.error = f"{type(raised).__name__}: {raised}"
            self._values.read(self._notes, found)
        for group, options in groups:  # rates that the hook sets move once per evaluation, not once per client
            group.update(options)
        found.update(row)
        return found

    @contextmanager
    def _unheard(self) -> Iterator[None]:
        trainer = self._trainer
        loggers = trainer.loggers
        with (
            redirect_stdout(StringIO()), preserve_modes(submodules(self._module)),
            shadowed(self._module, optimizers=_refuse, lr_schedulers=_refuse),
        ):  # fmt: skip
            trainer.loggers = [DummyLogger()] if loggers else []
            try:
                yield
            finally:
                trainer.loggers = loggers


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("optimizers and schedulers step once per evaluation, not once per client")
