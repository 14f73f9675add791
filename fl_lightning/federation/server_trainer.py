# SPDX-License-Identifier: Apache-2.0
"""What the package's callbacks read of a trainer, where a server runs rounds without one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fl_lightning.core.records import EvaluationRecord, RoundRecord
from fl_lightning.federation.federated_server import FederatedServer
from fl_lightning.lightning.names import Callback, LightningModule, Logger, TrainerFn, rank_zero_info
from fl_lightning.report.callbacks import ClientTable, FitRecorder

KNOWN = (ClientTable, FitRecorder)
"""Callbacks that read records alone."""


class ServerTrainer:
    """Stands in for the Trainer of a simulation before callbacks that read records; refuses others with a TypeError."""

    sanity_checking, fast_dev_run, is_global_zero, datamodule = False, False, True, None
    max_steps, check_val_every_n_epoch, precision, gradient_clip_val, num_nodes = -1, 1, None, None, 1
    federated_data, executor_fallback = None, None

    def __init__(
        self, server: FederatedServer, rounds: int, loggers: Sequence[Logger], callbacks: Sequence[Callback],
        folder: Path,
    ) -> None:  # fmt: skip
        for callback in callbacks:
            if not isinstance(callback, KNOWN):
                names = ", ".join(kind.__name__ for kind in KNOWN)
                raise TypeError(
                    f"callbacks must read records of rounds and evaluations alone ({names}), because a server has no "
                    f"Trainer, found {type(callback).__name__}"
                )
        self._server, self.loggers, self.callbacks = server, list(loggers), list(callbacks)
        self.max_epochs, self.default_root_dir = rounds, str(folder)
        self.ckpt_path: str | None = None  # that the run goes on from
        self.last_round: RoundRecord | None = None
        self.last_evaluation: EvaluationRecord | None = None
        self.state = SimpleNamespace(fn=TrainerFn.FITTING)
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
    def model(self) -> LightningModule:
        """The server's module."""
        return self._server.module

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
        return SimpleNamespace(loaders=_Sizes(self._server))

    @property
    def fit_description(self) -> Any:
        """Of the server."""
        return self._server.fit_description

    @property
    def memory_plan(self) -> Any:
        """Of the server."""
        return self._server.memory

    @property
    def root_device(self) -> Any:
        """Where the server computes."""
        return self._server.device


class _Sizes:
    dataset = ()

    def __init__(self, server: FederatedServer) -> None:
        self.names, self.sizes = tuple(server.client_names), server.client_sizes
