# SPDX-License-Identifier: Apache-2.0
"""Records everything that a report shows of a fit, and writes the report while the fit runs."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any, Literal

from fl_lightning import ops
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.layout import names_in
from fl_lightning.core.modules import trained_parameters
from fl_lightning.core.records import RoundRecord
from fl_lightning.lightning.fit_description import plain
from fl_lightning.lightning.names import Callback, LightningModule, Trainer
from fl_lightning.lightning.versions import versions
from fl_lightning.report.callbacks._federated import evaluation, federated_strategy, is_fitting, is_fresh_fit
from fl_lightning.report.page import plotly_js, write_report
from fl_lightning.report.record import FitRecord, record_from_json, record_to_json
from fl_lightning.report.record_builder import RecordBuilder, plain_json

_CELLS = 250_000
"""Of larger tables of clients by classes, none is kept."""
_SHARE = 20
"""Writing takes at most one part in so many of the fit's time, the end of the fit apart."""


class FitRecorder(Callback):
    """Keeps a :class:`fl_lightning.report.FitRecord` of the fit in memory.

    The record travels with the checkpoint. A resumed fit continues it: rounds that an interrupted run left behind are
    replaced. ``trainer.test`` adds the clients' test values, ``trainer.validate`` nothing.

    Args:
        method: what the record calls the method; default the name of its class.

    The record says how many samples of each class the clients hold, where the labels are known without reading all
    samples.

    Example::

        recorder = fl.callbacks.FitRecorder()
        trainer = L.Trainer(strategy=fl.FederatedStrategy(fl.algorithms.FedLF()), callbacks=[recorder])
        trainer.fit(model, data)
        fl.report.write_report([recorder.record], "report.html")
    """

    @checked()
    def __init__(self, method: str | None = None) -> None:
        self.method = method
        self._builder: RecordBuilder | None = None
        self._last: RoundRecord | None = None
        self._validation_began = 0.0

    @property
    def record(self) -> FitRecord:
        """What was recorded so far; it can be asked for during the fit.

        Raises:
            ValueError: no fit has begun.
        """
        if self._builder is None:
            raise ValueError(
                "record needs a fit that has begun, found none: pass the callback to Trainer(callbacks=[...])"
            )
        return self._builder.record()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses strategies that are not federated."""
        federated_strategy(trainer, self)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets an earlier fit unless this one continues it."""
        self._last = None
        if is_fresh_fit(trainer):
            self._builder = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes what is known before the first round."""
        known = _described(trainer, pl_module)
        if self.method is not None:
            known["method"] = self.method
        names, sizes = known.pop("client_names"), known.pop("client_sizes")
        if self._builder is None:
            self._builder = RecordBuilder(FitRecord(**known))
        self._builder.go_on(names, sizes)
        self._builder.record(**known)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the learning rate with which the first round begins."""
        if self._builder is not None and not self._builder.rounds:
            rates = {float(group["lr"]) for o in trainer.optimizers for group in o.param_groups if "lr" in group}
            self._builder.record(learning_rate=rates.pop() if len(rates) == 1 else None)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock of the validation."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds the round, because a checkpoint written after validation has to hold it, and its clients' values."""
        if not is_fitting(trainer) or trainer.sanity_checking:
            return
        took = time.perf_counter() - self._validation_began
        self._add_round(trainer)
        found = evaluation(trainer, self, "val")
        if self._builder is not None:
            self._builder.add_evaluation_seconds(took)
            if found is not None:
                self._builder.add_evaluation(found)
        self._grown(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds the round that just finished."""
        self._add_round(trainer)
        self._grown(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All rounds are over."""
        self._ended(trainer, "finished")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The fit ends before its time."""
        self._ended(trainer, "interrupted" if is_fitting(trainer) else None)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds the clients' test values."""
        found = evaluation(trainer, self, "test")
        if found is not None and self._builder is not None:
            self._builder.add_evaluation(found)
        self._ended(trainer)

    def _grown(self, trainer: Trainer) -> None:
        """The record has another round or evaluation."""

    def _ended(self, trainer: Trainer, status: Literal["finished", "interrupted"] | None = None) -> None:
        """A fit or a test is over."""
        if self._builder is not None and status is not None:
            self._builder.record(status=status)

    def state_dict(self) -> dict[str, Any]:
        """The record, as JSON text."""
        return {} if self._builder is None else {"record": record_to_json(self.record)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        if "record" in state_dict:
            self._builder = RecordBuilder(record_from_json(state_dict["record"]))

    def _add_round(self, trainer: Trainer) -> None:
        found = federated_strategy(trainer, self).last_round
        if found is None or found is self._last or self._builder is None:
            return
        self._last = found
        self._builder.add_round(found)
        if "epsilon" in found.scalars:  # of differential privacy, spent so far
            self._builder.add_setting("epsilon", found.scalars["epsilon"])


class Report(FitRecorder):
    """Writes one self-contained HTML file with pictures of the fit: who fares how, and why.

    The file can be opened from the first round on, and reloaded while the fit runs. It is written again at most every
    few seconds, and less often where writing takes long: it takes up to 5 % of the fit's time. It is written once more
    when the fit ends, also by an error, and after ``trainer.test``. The report of a resumed fit has all rounds, because
    the record travels with the checkpoint. Of several processes, the first writes. With ``fast_dev_run`` nothing is
    written.

    :func:`fl_lightning.report.write_report` writes a report of several fits side by side, from their :attr:`record`.

    Args:
        path: the file; a relative one is looked for in the working directory.
        method: what the report calls the method; default the name of its class.
        every: seconds between two versions of the file.

    Raises:
        ImportError: plotly, which the extra ``report`` brings, is missing.

    Example::

        trainer = L.Trainer(strategy=fl.FederatedStrategy(), callbacks=[fl.callbacks.Report("report.html")])
    """

    @checked(every=Bounds(0))
    def __init__(self, path: str | Path = "report.html", method: str | None = None, every: float = 5.0) -> None:
        super().__init__(method)
        plotly_js()  # or a long fit would end without its report
        self.path, self.every = Path(path), every
        self._due = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The file is due from now on."""
        super().on_train_start(trainer, pl_module)
        self._due = 0.0

    def _grown(self, trainer: Trainer) -> None:
        if self._last is not None and time.perf_counter() >= self._due:
            self._write(trainer)

    def _ended(self, trainer: Trainer, status: Literal["finished", "interrupted"] | None = None) -> None:
        super()._ended(trainer, status)
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        fast = trainer.fast_dev_run  # type: ignore[attr-defined]  # Trainer sets it outside its class
        if self._builder is None or fast or not trainer.is_global_zero:
            return
        began = time.perf_counter()
        write_report([self.record], self.path)
        took = time.perf_counter() - began
        self._due = began + max(self.every, _SHARE * took)


def _described(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """The entries of a record that are known before the first round."""
    strategy: Any = trainer.strategy
    fit, loaders = strategy.fit_description, trainer.train_dataloader.loaders  # type: ignore[union-attr]
    options = strategy.options
    seen = {"reads": options.reads, "clients_also_send": options.clients_also_send}
    data = strategy.federated_data or getattr(trainer, "datamodule", None)
    names, counts = _classes(data)
    return {
        "method": fit.called,
        "seed": fit.settings.get("seed"),
        "status": "runs",
        "planned_rounds": trainer.max_epochs if (trainer.max_epochs or -1) > 0 else None,
        "settings": plain_json({**fit.settings, "server_optimizer": fit.server_optimizer, **seen}),
        "arguments": plain_json({rule: given for rule, given in fit.arguments.items() if given}),
        "configuration": plain_json(_configuration(trainer, module, data)),
        "versions": _versions(),
        "command": "" if "ipykernel" in sys.modules else shlex.join(sys.orig_argv),
        "client_names": tuple(loaders.names),
        "client_sizes": tuple(loaders.sizes.tolist()),
        "class_names": names,
        "class_counts": counts,
        "memory": dict(strategy.memory_plan),
    }


def _configuration(trainer: Trainer, module: LightningModule, data: object) -> dict[str, Any]:
    strategy: Any = trainer.strategy
    trained = trained_parameters(module, names_in(strategy.fit_description.layout))
    names = ("max_epochs", "max_steps", "check_val_every_n_epoch", "precision", "gradient_clip_val", "num_nodes")
    return {
        "module": type(module).__name__,
        "trained parameters": sum(parameter.numel() for parameter in trained.values()),
        "hyperparameters": {name: plain(value) for name, value in dict(module.hparams).items()},
        "data": "" if data is None else str(data),
        "device": str(strategy.root_device),
        "executor": strategy.executor_fallback or "",
        "trainer": {name: plain(getattr(trainer, name, None)) for name in names},
    }


def _versions() -> dict[str, str]:
    known = {name: value for name, value in versions().items() if name != "CPU threads" and value != "not installed"}
    return {**known, "ops run on": ", ".join(sorted({one.implementation for one in ops.backend().values()}))}


def _classes(data: object) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    found = getattr(data, "known_label_counts", lambda: None)()
    if found is None or found[1].numel() > _CELLS:
        return (), ()
    return found[0], tuple(map(tuple, found[1].tolist()))
