# SPDX-License-Identifier: Apache-2.0
"""The interface of executors that carry a round's clients to workers, wherever these are, and the fit's side of it."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import torch

from fl_lightning.arguments import Bounds, check
from fl_lightning.clients.base import CohortExecutor, CohortRunner, DispatchingRunner, SequentialRunner, bound_here
from fl_lightning.clients.client_runner import ClientRunner
from fl_lightning.clients.schedules import scheduled_state
from fl_lightning.clients.visits import VisitOutcome
from fl_lightning.core.processes import pack, unpack
from fl_lightning.core.storage import rule_state
from fl_lightning.federation.messages import ServerMessage
from fl_lightning.federation.remote_visit import FitPayload, RoundPayload, VisitRequest, VisitWork, saved
from fl_lightning.fit.options import FitOptions
from fl_lightning.lightning.batches import ClientTask
from fl_lightning.lightning.module.values import PLAIN
from fl_lightning.lightning.names import LightningDataModule

Work: TypeAlias = Callable[[bytes, bytes], bytes]
_Rule = TypeVar("_Rule")
_SETTINGS = ("gradient_clip_algorithm", "gradient_clip_val", "max_epochs", "max_steps")


class Executor(CohortExecutor):
    """Carries clients to workers that somebody else starts and connects: processes, machines, a cluster.

    A subclass holds settings alone, so that one object serves any number of fits, and defines :meth:`start`.
    """

    @abstractmethod
    def start(self, work: Work) -> Workers:
        """A fit begins: makes its workers.

        Args:
            work: trains a client: ``answer = work(shared, request)``. It can be pickled, holds the data of all clients,
                and is the same for the whole fit, so send it to each worker once.
        """

    def pickler(self) -> ModuleType:
        """What pickles module and data: a module with a ``Pickler``, such as :mod:`pickle` itself or cloudpickle."""
        return pickle

    def obstacle(self, clients: ClientRunner) -> str | None:
        """See :meth:`CohortExecutor.obstacle`."""
        if clients.trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            return "workers get the data once, and reload_dataloaders_every_n_epochs loads them anew"
        return bound_here(clients)

    def runner(self, clients: ClientRunner) -> CohortRunner:
        """Starts workers when the first round begins."""
        payload = fit_payload(clients)
        payload.datamodule.trainer = None  # it leads to loops and generators, which nothing can pickle
        try:
            work = VisitWork(saved(payload, self.pickler()))
        except Exception as error:  # __reduce__ of anybody may raise anything
            return SequentialRunner(clients, f"the data cannot be pickled ({type(error).__name__}: {error})")
        finally:
            payload.datamodule.trainer = clients.trainer
        return RemoteRunner(clients, self, work)


class Workers(ABC):
    """The workers of one fit."""

    @abstractmethod
    def run(self, shared: bytes, requests: Sequence[bytes]) -> Iterator[tuple[int, bytes | Exception]]:
        """Lets workers answer the requests of a round.

        Args:
            shared: what the requests have in common, the module included.
            requests: one for each client, which take longest first.

        Yields:
            The place of a request, and what ``work(shared, request)`` returned, in any order, as they are done; in
            place of an answer the exception if there is none, because a worker has died. Its client has failed then.
            What the client itself raises is in an answer.
        """

    @abstractmethod
    def stop(self) -> None:
        """The fit is over, however it ended, perhaps in the middle of :meth:`run`."""


class RemoteRunner(DispatchingRunner):
    """Lets workers answer requests."""

    def __init__(self, clients: ClientRunner, executor: Executor, work: Work) -> None:
        super().__init__(clients, type(executor).__name__)
        self._executor, self._work = executor, work
        self._workers: Workers | None = None
        self._sent = 0  # requests of all rounds; each has a place of its own among them

    def begin_round(self, tasks: Sequence[ClientTask]) -> None:
        """See :meth:`DispatchingRunner.begin_round`."""
        if self._workers is None and self.fallback is None:
            name = f"what start of {type(self._executor).__name__} returns"
            self._workers = check(name, self._executor.start(self._work), Workers)
        super().begin_round(tasks)

    def close(self) -> None:
        """Stops the workers."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.stop()

    def dispatch(self, places: list[int]) -> None:
        """Makes requests."""
        assert self._workers is not None
        self._places, tasks = places, self._tasks
        shared = saved(round_payload(self._clients, tasks[0].round), self._executor.pickler())
        requests = [pack(self._request(tasks[place], self._sent + place)) for place in places]
        arriving = self._workers.run(shared, requests)
        self._arriving = iter(check(f"what run of {type(self._workers).__name__} returns", arriving, Iterable[Any]))
        self._sent += len(places)

    def receive(self) -> None:
        """Takes the next answer."""
        run, last = f"run of {type(self._workers).__name__}", len(self._places) - 1
        arrived = next(self._arriving, None)
        if arrived is None:
            missing = self._places.index(self._current)
            raise ValueError(f"{run} must yield an answer to each of the {last + 1} requests, found none to {missing}")
        number, answer = check(f"what {run} yields", arrived, tuple[int, bytes | Exception], Bounds(0, last))
        place = self._places[number]
        if isinstance(answer, Exception):
            self._results[place] = VisitOutcome(place, error=answer)
            return
        found = unpack(answer, self._clients.global_params.device)
        if not isinstance(found, VisitOutcome) or found.place != self._sent - len(self._places) + place:
            raise ValueError(f"{run} must yield {number} with the answer to that request, found another's")
        self._results[place] = found
        self._flaw = self._flaw or found.flaw

    def _request(self, task: ClientTask, place: int) -> VisitRequest:
        client, rule = task.client_id, self._clients.rule
        assert client is not None
        optimizers = self._clients.optimizers.state_dict().get(client)
        before = {"rule": rule_state.local_state(rule, client), "round": task.round, "optimizers": optimizers}
        return VisitRequest(client, place, rule_state.client_state(rule, client), before)


def fit_payload(clients: ClientRunner) -> FitPayload:
    """What a fit's visits have in common."""
    trainer: Any = clients.trainer
    options = copy(clients.options)
    assert isinstance(options, FitOptions)
    vars(options).pop("method", None)  # is found anew
    unused = dict.fromkeys(("client", "executor", "guard", "partition", "sampler", "server_optimizer"))
    vars(options).update(unused, algorithm=_bare(options.algorithm), client_rule=_bare(clients.rule))
    data = trainer.datamodule or LightningDataModule()
    return FitPayload(clients.batches.loaders, data, options, _settings(clients), [*map(_face, trainer.loggers)])


def round_payload(clients: ClientRunner, index: int) -> RoundPayload:
    """What the visits of a round have in common."""
    trainer, rounds = clients.trainer, clients.trainer.max_epochs
    broadcast = rule_state.broadcast(clients.rule)
    message = ServerMessage(
        index, clients.global_params, broadcast, rounds=rounds if rounds and rounds > 0 else None,
        loss_batch_factor=clients.losses.factor,
    )  # fmt: skip
    options = [scheduled_state(optimizer) for optimizer in trainer.optimizers]
    states = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    schedules, metrics = clients.schedules.state_dict(), dict(trainer.callback_metrics)
    return RoundPayload(clients.module, message, options, states, schedules, metrics)


def _bare(rule: _Rule) -> _Rule:
    """A copy that knows nothing of other clients, and has no place to put things."""
    bare = copy(rule)
    rule_state.reset(bare)
    for name in rule_state.placement(bare):
        setattr(bare, name, None)
    return bare


def _settings(clients: ClientRunner) -> dict[str, Any]:
    """What a trainer does to visits."""
    trainer, kind, batches = clients.trainer, clients.global_params.device.type, clients.batches
    strict = torch.are_deterministic_algorithms_enabled() and (
        "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else True
    )
    return {
        **{name: getattr(trainer, name) for name in _SETTINGS}, "accelerator": "gpu" if kind == "cuda" else kind,
        "plugins": [trainer.precision_plugin], "accumulate_grad_batches": batches.window,
        "limit_train_batches": batches.limit, "deterministic": strict, "detect_anomaly": torch.is_anomaly_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
    }  # fmt: skip


def _face(logger: Any) -> Any:
    """A logger's class and plain settings, for modules that ask which one they have."""
    face = object.__new__(type(logger))
    vars(face).update({name: value for name, value in vars(logger).items() if isinstance(value, PLAIN)})
    return face
