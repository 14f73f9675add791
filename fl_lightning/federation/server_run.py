# SPDX-License-Identifier: Apache-2.0
"""One run of a server: its checkpoint, its loggers and callbacks, and what it says of every round."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch

from fl_lightning.arguments import trusted
from fl_lightning.core.records import EvaluationRecord, RoundRecord, client_label, round_metrics
from fl_lightning.core.storage.files import read_whole, write_whole
from fl_lightning.federation.federated_server import FederatedServer
from fl_lightning.fit.evaluation.evaluator import EvaluationReport, shown_angle
from fl_lightning.lightning.names import Callback, Logger, TrainerFn, rank_zero_info
from fl_lightning.lightning.versions import package_versions
from fl_lightning.metrics.functional import Mode
from fl_lightning.report.callbacks import ClientTable, FitRecorder
from fl_lightning.report.number_formats import plural


class ServerRun:
    """Writes down what a :class:`FederatedServer` does, whatever carries its messages.

    Logged names are those of docs/logged.md. Values of an evaluation may arrive with the answers of the next round;
    they are logged under the round after which they were taken. The server knows how many rounds there are;
    ``callbacks`` are those of this package that read records; ``last.ckpt`` lies in ``folder``.
    """

    def __init__(
        self,
        server: FederatedServer,
        folder: Path,
        loggers: Sequence[Logger] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        options = server.options
        self._server, self._metric = server, options.fairness_metric
        self._report = EvaluationReport(options.fairness_metric, options.fairness_mode, options.log_client_names)
        self.trainer = ServerTrainer(server, loggers, callbacks, folder)
        self.path = folder / "last.ckpt"

    # ---- checkpoint

    def resume(self) -> dict[str, Any] | None:
        """Goes on from the checkpoint, if there is one; returns what :meth:`save` was given besides."""
        path = self.path
        if not path.exists():
            return None
        load = partial(torch.load, path, map_location="cpu", weights_only=True)
        state = read_whole(path, load, "take another folder to begin anew, or bring back a copy")
        self._server.load_state_dict(state["server"], f"the checkpoint {path}")
        for callback, saved in zip(self.trainer.callbacks, state["callbacks"], strict=False):
            if saved["name"] == type(callback).__name__:
                callback.load_state_dict(saved["state"])
        self.trainer.ckpt_path = str(path)
        rank_zero_info(f"goes on from {path}: {self._server.round} of {self._server.rounds} rounds are done")
        return dict(state["extra"])

    def save(self, extra: Mapping[str, Any]) -> None:
        """Writes the checkpoint: as a whole, or not at all."""
        callbacks = [{"name": type(c).__name__, "state": c.state_dict()} for c in self.trainer.callbacks]
        server = self._server.state_dict()
        # Lightning's names, too: Module.load_from_checkpoint(path) reads the file.
        content = {"state_dict": server["state_dict"], "pytorch-lightning_version": package_versions()["lightning"]}
        write_whole(self.path, {**content, "server": server, "callbacks": callbacks, "extra": dict(extra)})

    # ---- a run

    @contextmanager
    def running(self) -> Iterator[None]:
        """All that the first round needs is there; the rounds, inside."""
        call, loggers = self.trainer.call, self.trainer.loggers
        self._server.begin()
        call("setup", "fit")
        call("on_fit_start")
        call("on_train_start")
        try:
            yield
        except BaseException as error:
            call("on_exception", error)
            for logger in loggers:
                logger.finalize("failed")
            raise
        words = self._server.finish()
        if words is not None:
            rank_zero_info(words)
        call("on_train_end")
        call("on_fit_end")
        for logger in loggers:
            logger.finalize("success")

    def closed(self, record: RoundRecord) -> None:
        """A round is over."""
        self.trainer.last_round = record
        self.trainer.call("on_train_epoch_start")
        self._log(round_metrics(record), record.round)
        self.trainer.call("on_train_epoch_end")
        rank_zero_info(self._line(record))

    def evaluated(
        self, answers: Iterable[EvaluationRecord], stage: Literal["val", "test"], round: int  # noqa: A002
    ) -> EvaluationRecord | None:  # fmt: skip
        """Clients have evaluated the model after so many rounds; returns all values, ``None`` if nobody has any."""
        found = joined(answers, stage, round, self._server.client_names)
        if found is None:
            return None
        record = self._report.oriented(found)
        metrics, of_clients = self._report.numbers(record)
        self._log(metrics | of_clients, round - 1)  # under the last of these rounds, which count from 0
        self.trainer.evaluated(record)
        rank_zero_info(self._values(record, metrics))
        if stage == "test":
            self._report.print_table(record, self.trainer)
        return record

    def _log(self, metrics: Mapping[str, float], round: int) -> None:  # noqa: A002
        """Gives numbers to the loggers, at the step and epoch that a simulation gives them."""
        places = self._server.cohort_size
        for logger in self.trainer.loggers:
            logger.log_metrics({**metrics, "epoch": round}, step=(round + 1) * places - 1)
            logger.save()

    def _line(self, record: RoundRecord) -> str:
        names = self._server.client_names
        number = f"round {record.round} ({record.round + 1} of {self._server.rounds})"
        if record.skipped is not None:
            return f"{number} changed nothing: {record.skipped} ({record.seconds:.1f} s)"
        out = ", ".join(f"client {client_label(k, names)} ({why})" for k, why in record.dropped.items())
        parts = [
            f"{len(record.client_ids)} clients" + (f", without {out}" if out else ""),
            f"training loss {record.train_loss:.4g}",
            *([] if record.conflicts is None else [f"{record.conflicts} in conflict with the step"]),
            f"{record.seconds:.1f} s, of these {record.seconds - record.training_seconds:.2f} s on the server",
        ]
        return f"{number}: {'; '.join(parts)}"

    def _values(self, record: EvaluationRecord, metrics: Mapping[str, float]) -> str:
        shown = [name for name in record.values if self._metric in (None, name)]
        parts = [
            f"{n} mean {metrics[f'fed/{n}/mean']:.4g}, worst 10 % {metrics[f'fed/{n}/worst_10']:.4g}" for n in shown
        ]
        angle = shown_angle(record, metrics, self._metric)
        end = "" if angle is None else f"; fairness angle {angle:.3f}"
        stage = f"{'test' if record.stage == 'test' else 'evaluation'} after {plural(record.round, 'round')}"
        return f"{stage}: {len(record.client_ids)} clients; {'; '.join(parts)}{end}"


def joined(
    answers: Iterable[EvaluationRecord], stage: Literal["val", "test"], round: int, names: Sequence[str]  # noqa: A002
) -> EvaluationRecord | None:  # fmt: skip
    """One record of what clients have found, each for itself; ``None`` if nobody has anything."""
    rows = {client: found for found in answers for client in found.client_ids}
    clients = sorted(rows)
    if not clients:
        return None
    found = list(dict.fromkeys(name for client in clients for name in rows[client].values))
    one = torch.tensor([nan], dtype=torch.float64)
    values = {name: torch.cat([rows[c].values.get(name, one).double() for c in clients]) for name in found}
    undefined = {n: {c: rows[c].undefined[n][c] for c in clients if c in rows[c].undefined.get(n, {})} for n in found}
    votes: dict[str, Counter[Mode]] = defaultdict(Counter)  # one client alone must not turn a metric around
    for client in clients:
        for name, mode in rows[client].modes.items():
            votes[name][mode] += 1
    modes = {name: found.most_common(1)[0][0] for name, found in votes.items()}
    sizes = torch.cat([rows[client].sizes for client in clients])
    undefined = {name: reasons for name, reasons in undefined.items() if reasons}
    called = tuple(names[client] for client in clients)
    one_class = {n: some for n in found if (some := tuple(c for c in clients if n in rows[c].one_class))}
    return trusted(EvaluationRecord)(round, stage, tuple(clients), sizes, values, undefined, modes, called, one_class)


KNOWN = (ClientTable, FitRecorder)
"""Callbacks that read records alone."""


class ServerTrainer:
    """Stands in for the Trainer of a simulation before callbacks that read records; refuses others with a TypeError."""

    sanity_checking, fast_dev_run, is_global_zero, datamodule = False, False, True, None
    max_steps, check_val_every_n_epoch, precision, gradient_clip_val, num_nodes = -1, 1, None, None, 1
    federated_data, executor_fallback = None, None

    def __init__(
        self, server: FederatedServer, loggers: Sequence[Logger], callbacks: Sequence[Callback], folder: Path
    ) -> None:
        for callback in callbacks:
            if not isinstance(callback, KNOWN):
                names = ", ".join(kind.__name__ for kind in KNOWN)
                raise TypeError(
                    f"callbacks must read records of rounds and evaluations alone ({names}), because a server has no "
                    f"Trainer, found {type(callback).__name__}"
                )
        self._server, self.loggers, self.callbacks = server, list(loggers), list(callbacks)
        self.max_epochs, self.default_root_dir = server.rounds, str(folder)
        self.ckpt_path: str | None = None  # that the run goes on from
        self.last_round: RoundRecord | None = None
        self.last_evaluation: EvaluationRecord | None = None
        self.state = SimpleNamespace(fn=TrainerFn.FITTING)
        self.model, self.root_device, self.fit_description = server.module, server.module.device, server.fit_description
        self.options = server.options
        self.strategy = self

    def call(self, hook: str, *args: Any) -> None:
        """Calls a hook of all callbacks."""
        for callback in self.callbacks:
            getattr(callback, hook)(self, self.model, *args)

    def evaluated(self, record: EvaluationRecord) -> None:
        """An evaluation is over: inside the fit, or a test after it."""
        self.last_evaluation = record
        if record.stage == "val":
            self.call("on_validation_end")
            return
        self.state.fn = TrainerFn.TESTING
        self.call("on_test_end")
        self.state.fn = TrainerFn.FITTING

    def print(self, text: str) -> None:
        """Prints a table."""
        rank_zero_info(text)

    # ---- what callbacks read of a trainer and its strategy

    @property
    def current_epoch(self) -> int:
        """The round."""
        return self._server.round

    @property
    def log_dir(self) -> str | None:
        """The folder of the first logger."""
        return next((logger.log_dir or logger.save_dir for logger in self.loggers), None)

    @property
    def optimizers(self) -> list[Any]:
        """The clients' learning rate, where optimizers have it."""
        rate = self._server.learning_rate
        return [] if rate is None else [SimpleNamespace(param_groups=[{"lr": rate}])]

    @property
    def train_dataloader(self) -> Any:
        """Names and sizes of the clients; the server has no data."""
        names, sizes = tuple(self._server.client_names), self._server.client_sizes
        return SimpleNamespace(loaders=SimpleNamespace(dataset=(), names=names, sizes=sizes))

    @property
    def memory_plan(self) -> Any:
        """Of the server."""
        return self._server.memory
