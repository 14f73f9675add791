# SPDX-License-Identifier: Apache-2.0
"""A client's visit in any process: a fit's work turns a request into an answer, from nothing but what is in both."""

from __future__ import annotations

import io
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms.records import State
from fl_lightning.clients.module_isolation import ModuleIsolation
from fl_lightning.clients.schedules import load_scheduled_states
from fl_lightning.clients.visits import VisitOutcome, VisitRecorder, packed, portable
from fl_lightning.core.processes import unpack
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.federation.client_visit import VisitStrategy
from fl_lightning.federation.messages import ServerMessage
from fl_lightning.federation.module_changes import ModuleAtClient
from fl_lightning.fit.options import FitOptions
from fl_lightning.lightning.batches import ClientTask
from fl_lightning.lightning.names import LightningDataModule, LightningModule, Trainer, quiet
from fl_lightning.lightning.round_clock import MeanVisit

_CPU = torch.device("cpu")
_AROUND = (
    "configure_callbacks", "configure_model", "on_fit_end", "on_fit_start", "on_train_end", "on_train_epoch_end",
    "on_train_epoch_start", "on_train_start", "prepare_data", "setup", "teardown",
)  # fmt: skip
"""Hooks around visits, which run in the fit itself."""


@dataclass(frozen=True)
class FitPayload:
    """What a fit's visits have in common."""

    data: ClientLoaders
    datamodule: LightningDataModule  # for its hooks
    options: FitOptions
    trainer: Mapping[str, Any]
    loggers: Sequence[Any]  # of their classes, with their plain settings


@dataclass(frozen=True)
class RoundPayload:
    """What the visits of a round have in common."""

    module: LightningModule
    message: ServerMessage  # its parameters are the module's
    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    schedules: dict[str, Any]
    metrics: dict[str, Tensor]  # trainer.callback_metrics


@dataclass(frozen=True)
class VisitRequest:
    """One visit."""

    client_id: int
    place: int  # among the requests of a fit
    client_state: State
    before: Mapping[str, Any]  # what the client has kept


def saved(value: object, pickler: ModuleType) -> bytes:
    """The bytes of an object; tensors that share memory still do when they are read."""
    file = io.BytesIO()
    torch.save(value, file, pickle_module=pickler)
    return file.getvalue()


def _read(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location=_CPU, weights_only=False)


@dataclass
class VisitWork:
    """Trains a client: a function of what all requests of a round share, and of the request.

    It can be pickled, and reads its :class:`FitPayload` in each process once.
    """

    payload: bytes
    _payload: FitPayload | None = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"payload": self.payload, "_payload": None}

    def __call__(self, shared: bytes, request: bytes) -> bytes:
        """The packed answer; what the visit raises is in it."""
        asked: VisitRequest = unpack(request, _CPU)
        try:
            self._payload = self._payload or _read(self.payload)
            outcome = _visit(self._payload, _read(shared), asked)
        except Exception as error:
            outcome = VisitOutcome(asked.place, error=portable(error), trace=traceback.format_exc())
        return packed(outcome)


def _visit(payload: FitPayload, shared: RoundPayload, request: VisitRequest) -> VisitOutcome:
    module, data = shared.module, payload.datamodule
    vars(module).update(dict.fromkeys(_AROUND, _nothing))
    vars(data).update(dict.fromkeys(("prepare_data", "setup", "teardown"), _nothing))
    vars(data)["train_dataloader"] = lambda: payload.data
    with quiet(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Found \d+ module\(s\) in eval mode")  # the fit has said so
        visit = RemoteVisit(payload, shared, request)
        trainer = Trainer(
            strategy=visit, devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0, num_sanity_val_steps=0, **payload.trainer,
        )  # fmt: skip
        trainer.fit(module, datamodule=data)
    assert visit.outcome is not None
    return visit.outcome


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class RemoteVisit(VisitStrategy):
    """One client's visit to a copy of a fit, which stands where the round began."""

    def __init__(self, payload: FitPayload, shared: RoundPayload, request: VisitRequest) -> None:
        message = replace(shared.message, client_state=request.client_state)
        at_client = ModuleAtClient(shared.module, {}, set())
        super().__init__(payload.options, request.client_id, None, message, request.before, at_client, "train")
        self._payload, self._shared, self._place = payload, shared, request.place
        self._begun = ModuleIsolation(shared.module)
        self._begun.begin()
        self.outcome: VisitOutcome | None = None

    def _set_clock(self, own: MeanVisit, mean_visit: MeanVisit | None) -> None:
        self._loop.clock.mean_visit = own

    def _catch_up(self) -> None:
        trainer, shared = self._trainer, self._shared
        load_scheduled_states(trainer.optimizers, shared.optimizers)
        for config, state in zip(trainer.lr_scheduler_configs, shared.schedulers, strict=True):
            config.scheduler.load_state_dict(state)
        self.side.schedules.load_state_dict(shared.schedules)

    def begin_round(self) -> None:
        """Takes back what ``configure_optimizers`` has done to the module: it did so before."""
        self._begun.restore()

    def train_client(self, task: ClientTask) -> Tensor | None:
        """Trains the client as in a worker process of :class:`Parallel`."""
        trainer, recorder = self._trainer, VisitRecorder(self.side.runner)
        self._loop.publish({name: float(value) for name, value in self._shared.metrics.items()}, {})
        trainer.loggers = list(self._payload.loggers)
        with recorder.recording():
            self.outcome = recorder.visit(task, self._place)
        trainer.loggers = []
        return None

    def close_round(self) -> None:
        """Adds what the round's end finds, and the update."""
        assert self.outcome is not None
        if self.outcome.upload is not None:
            self.outcome = replace(self.outcome, update=self.side.runner.rows.update(0))
        try:
            self.side.end_round()
        except ValueError as error:
            self.outcome = replace(self.outcome, flaw=str(error))

    def end_epoch(self) -> None:
        """Nothing: the fit itself moves schedulers."""
