# SPDX-License-Identifier: Apache-2.0
"""Evaluates one model on every client's data, and tells users of it: logs, the progress bar, warnings, a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from inspect import signature
from itertools import product
from math import isnan, nan
from typing import Any, Protocol

import torch

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.arguments import altered, trusted
from fl_lightning.core.records import EvaluationRecord, named
from fl_lightning.core.seeding import derive_seed, isolated
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.fit.evaluation.client_evaluation import ClientEvaluation, ClientPart
from fl_lightning.fit.evaluation.one_client import PREFIX, personal_evaluation
from fl_lightning.fit.loaders import EvaluationLoader, RoundLoader
from fl_lightning.fit.options import FitOptions
from fl_lightning.lightning.batches import walked_loaders
from fl_lightning.lightning.logged_values import publish
from fl_lightning.lightning.names import Callback, LightningModule, Trainer, TrainerFn, rank_zero_info, rank_zero_warn
from fl_lightning.metrics.functional import Mode, guessed_mode
from fl_lightning.report.callbacks.client_table import ClientTable, format_client_table

_MANY_CLIENTS = 200
_NAMED = 10  # clients in a warning
_summary = trusted(EvaluationRecord.summary)
_WORDS: Mapping[Mode, str] = {"max": "large", "min": "small", "abs": "near 0"}


class EvaluatedModel(Protocol):
    """The parameters that the module holds while it is evaluated."""

    @property
    def trained(self) -> Sequence[str] | None:
        """Names of the trained parameters; ``None`` before the first fit."""

    def show(self) -> None:
        """Binds the parameters that the method wants evaluated."""

    def restore(self) -> None:
        """Binds the global parameters."""


class Evaluator(Callback):
    """Runs around every validation and test.

    ``report`` tells users what was found, if anybody does. ``record`` is the last finished evaluation, ``None`` if it
    ran on data that is not divided among clients. ``loaded`` is the federated state of the checkpoint that the running
    trainer function has loaded, if any.
    """

    def __init__(self, model: EvaluatedModel, options: FitOptions, report: EvaluationReport | None) -> None:
        self._model, self._options, self._report = model, options, report
        self._running: ClientEvaluation | None = None
        self._round, self._said = 0, set[str]()
        self._guard = ExitStack()
        self.record: EvaluationRecord | None = None
        self.loaded: dict[str, Any] | None = None

    def loader(
        self, module: LightningModule, stage: str, loaders: ClientLoaders, limit: int | float
    ) -> EvaluationLoader:
        """Walks over the clients' data of a stage; refuses a module that fetches batches itself."""
        step = module.validation_step if stage == "val" else module.test_step
        if "dataloader_iter" in signature(step).parameters:
            raise ValueError(f"{type(module).__name__}.{step.__name__} must take a batch, found dataloader_iter")
        return EvaluationLoader(loaders, limit)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Binds the parameters to evaluate, and starts to collect if the data of the stage is divided."""
        stage = "test" if trainer.testing else "val"
        # Validation inside a fit follows the round whose epoch is still open.
        fits = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        self._round = trainer.current_epoch + int(fits)
        self._guard.close()
        seed = derive_seed(self._options.seed, stage, self._round)
        self._guard.enter_context(isolated(seed, trainer.strategy.root_device))
        self._model.show()
        loaders = _divided_loaders(trainer)
        if loaders:
            personal, rule = None, self._options.client_rule
            if type(rule).personal_model is not ClientRule.personal_model and not trainer.sanity_checking:
                layers, trained = self._options.algorithm.layers, self._model.trained
                names = next(one.loaders.names for one in loaders if one is not None)
                personal = personal_evaluation(trainer, rule, self.loaded, layers, trained, names)
            ranks = trainer.strategy.ranks  # type: ignore[attr-defined]
            say = partial(self._say, rank_zero_info)
            self._running = ClientEvaluation(trainer, loaders, stage, say, personal, seed, ranks)
            self._guard.enter_context(self._running.listening())
        elif not trainer.sanity_checking:
            self.record = None  # nobody may take an earlier one for this one's

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps and reports what was collected, unless this was the sanity check."""
        if self._running is not None and not trainer.sanity_checking:
            self.record = self._recorded(self._running, trainer)
            if self._report is not None:
                self.record = self._report.oriented(self.record)
                self._report.log(self.record, trainer, self)

    def _say(self, how: Callable[[str], None], text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            how(text)

    def _recorded(self, evaluation: ClientEvaluation, trainer: Trainer) -> EvaluationRecord:
        """What was collected; a metric that a client did not log is NaN for it."""
        parts = evaluation.parts()
        failed = [part.row for part in parts.values() if part.row.error is not None]
        if failed and len(failed) == len(parts):
            self._say(
                rank_zero_warn,
                f"{type(trainer.lightning_module).__name__}.{evaluation.hook} does not run for a client alone "
                f"({failed[0].error}): no client has values of what it logs after that",
            )
        else:  # what the others log is undefined for them
            logged = dict.fromkeys(name for part in parts.values() for name in part.row.values)
            for row, name in product(failed, logged):
                if name not in row.values:
                    row.add(name, nan, row.error)
        called = max((one.loaders.names for one in evaluation.divided), key=len)
        trained = evaluation.divided[-1].loaders.num_trained
        known = [] if self._report is None or not parts else _in_training(trainer)  # a client elsewhere knows nobody
        if missing := [client for client in known if client < trained and client not in parts]:
            some = ", ".join(named(client, called[client]) for client in missing[:_NAMED])
            rest = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            self._say(
                rank_zero_warn,
                "clients that train and have nothing to be evaluated on in "
                f"{'validation' if evaluation.stage == 'val' else 'test'}: {some}{rest}. Their rows in tables are "
                "empty, and they count in no mean, worst or angle",
            )
            parts = dict(sorted({**parts, **{client: ClientPart() for client in missing}}.items()))
        return _record(self._round, evaluation.stage, parts, called)

    def stop(self) -> None:
        """The evaluation is over or was cut short: the training parameters and the random state come back."""
        self._model.restore()
        self._guard.close()
        self._running = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the training parameters back before anybody saves a checkpoint."""
        self.stop()

    on_test_start, on_test_epoch_end = on_validation_start, on_validation_epoch_end

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the per-client table."""
        self.stop()
        if self._report is not None and self.record is not None and self.record.stage == "test":
            self._report.print_table(self.record, trainer)


def _divided_loaders(trainer: Trainer) -> list[EvaluationLoader | None]:
    """The loaders of the running evaluation, ``None`` for one whose data is not divided; empty if all are such.

    Of loaders that are walked side by side, the last whose data is divided.
    """
    walked, in_turn = walked_loaders(trainer)
    found = [one if isinstance(one, EvaluationLoader) else None for one in walked]
    last = [one for one in found if one is not None][-1:]
    return found if in_turn and last else [*last]


def _record(round: int, stage: str, parts: Mapping[int, ClientPart], called: Sequence[str]) -> EvaluationRecord:  # noqa: A002
    rows = {client: part.row for client, part in parts.items()}
    for client, part in parts.items():
        if part.own is not None:
            rows[client].update(part.own, PREFIX)
    names = list(dict.fromkeys(name for row in rows.values() for name in row.values))
    values = {n: torch.tensor([r.values.get(n, nan) for r in rows.values()], dtype=torch.float64) for n in names}
    undefined = {n: {c: r.undefined[n] for c, r in rows.items() if n in r.undefined} for n in names}
    one_class = {n: some for n in names if (some := tuple(c for c, r in rows.items() if n in r.one_class))}
    modes: dict[str, Mode] = {
        name: "max" if better else "min" for row in rows.values() for name, better in row.larger_is_better.items()
    }
    return trusted(EvaluationRecord)(
        round, stage, tuple(rows), torch.tensor([part.size for part in parts.values()], dtype=torch.int64), values,
        undefined={name: found for name, found in undefined.items() if found}, modes=modes,
        client_names=tuple(called[c] for c in rows), one_class=one_class,
    )  # fmt: skip


def _in_training(trainer: Trainer) -> list[int]:
    """The clients that have training data, as far as the trainer knows them."""
    data = getattr(trainer, "datamodule", None)
    if isinstance(data, FederatedDataModule):
        return data.client_sizes.nonzero().flatten().tolist()
    loader = trainer.train_dataloader
    return loader.loaders.sizes.nonzero().flatten().tolist() if isinstance(loader, RoundLoader) else []


def shown_angle(record: EvaluationRecord, metrics: Mapping[str, float], fairness_metric: str | None) -> float | None:
    """The fairness angle for the progress bar: that of ``fairness_metric``, else of the first metric that has one."""
    names = [fairness_metric] if fairness_metric is not None else list(record.values)
    angles = (metrics.get(f"fed/{name}/angle", nan) for name in names)
    return next((angle for angle in angles if not isnan(angle)), None)


class EvaluationReport:
    """Logs and prints how evenly the clients fare.

    ``metric`` is that whose direction and angle are of interest; ``None``: see :func:`shown_angle`. ``mode`` says which
    of its values are good, or it of every metric in the mapping.
    """

    def __init__(self, metric: str | None, mode: Mode | Mapping[str, Mode], by_name: bool = False) -> None:
        self._metric, self._looked_for, self._by_name = metric, False, by_name
        if isinstance(mode, str):
            self._modes: Mapping[str, Mode] = {} if metric is None else {metric: mode}
        else:
            self._modes = dict(mode)
        self._assumed: set[str] = set()
        self._undefined: set[str] = set()

    def oriented(self, record: EvaluationRecord) -> EvaluationRecord:
        """The record with every metric's mode: what the user says, else the metric object, else the name."""
        modes: dict[str, Mode] = {}
        assumed = []
        for name in record.values:
            base = name.removeprefix(PREFIX)
            known = self._modes.get(name) or self._modes.get(base) or record.modes.get(name) or record.modes.get(base)
            modes[name] = known or trusted(guessed_mode)(base)
            if known is None and base not in self._assumed:
                self._assumed.add(base)
                assumed.append(f"{base} {_WORDS[modes[name]]}")
        if assumed:
            rank_zero_info(
                f"Good values of metrics, by their names: {', '.join(assumed)}. Where that is wrong, say so: "
                "fairness_mode={name: 'max', 'min' or 'abs'}."
            )
        return altered(record, modes=modes)

    def log(self, record: EvaluationRecord, trainer: Trainer, callback: Callback) -> None:
        """Logs the summary, the clients' values, and the angle for the progress bar."""
        metrics, of_clients = self.numbers(record)
        for name, value in metrics.items():
            # The name may hold that of one of several loaders, which Lightning takes for its own to give.
            callback.log(name, value, add_dataloader_idx=False)  # type: ignore[attr-defined]
        angle = shown_angle(record, metrics, self._metric)
        publish(trainer, of_clients, {} if angle is None else {"angle": angle})

    def numbers(self, record: EvaluationRecord) -> tuple[dict[str, float], dict[str, float]]:
        """The summary, and clients' values unless they are many, under the names of docs/logged.md.

        Warns of what is missing or undefined in them.
        """
        self._look_for_metric(record)
        self._name_undefined(record)
        metrics, of_clients = dict[str, float](), dict[str, float]()
        labels = record.client_names if self._by_name else record.client_ids
        for name, values in record.values.items():
            metrics |= {f"fed/{name}/{key}": float(value) for key, value in _summary(record, name).items()}
            metrics[f"fed/{name}/undefined"] = float(len(record.undefined.get(name, ())))
            if len(labels) <= _MANY_CLIENTS:
                rows = zip(labels, values, record.sizes, strict=True)
                of_clients |= {f"fed/{name}/client/{label}": float(value) for label, value, size in rows if size}
        return metrics, of_clients

    def _name_undefined(self, record: EvaluationRecord) -> None:
        """Warns once per metric of clients for which it is undefined."""
        names = dict(zip(record.client_ids, record.client_names, strict=True))
        for metric, reasons in record.undefined.items():
            if metric in self._undefined:
                continue
            self._undefined.add(metric)
            client, reason = next(iter(reasons.items()))
            others = f" and {len(reasons) - 1} more" if len(reasons) > 1 else ""
            rank_zero_warn(
                f"{metric} is undefined for client {named(client, names[client])} ({reason}){others}: such clients are "
                f"left out of its mean, worst and angle, and counted in fed/{metric}/undefined"
            )

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

    def print_table(self, record: EvaluationRecord, trainer: Any) -> None:
        """Prints the clients' values, unless a ClientTable callback does."""
        if not any(isinstance(callback, ClientTable) for callback in trainer.callbacks):
            trainer.print(format_client_table(record))
