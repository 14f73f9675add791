# SPDX-License-Identifier: Apache-2.0
"""A client's visit to a copy of the fit, and how what it leaves gets into the fit when the client's turn comes.

Every visit begins with the model and the module as the round found them, so it does not matter where it happens. A
transport carries outcomes and knows nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.clients.client_runner import ClientRunner
from fl_lightning.clients.update_rows import Upload
from fl_lightning.core.errors import ModuleError
from fl_lightning.core.modules import submodules
from fl_lightning.core.processes import pack, unpack
from fl_lightning.lightning.batches import ClientTask
from fl_lightning.lightning.fast_log import LogCall, LoggedMetric, TrainingLog, current_hook, replay
from fl_lightning.lightning.metric_state import last_value
from fl_lightning.lightning.module.values import PLAIN
from fl_lightning.lightning.names import LightningModule


@dataclass(frozen=True)
class VisitOutcome:
    """What a visit to a copy of the fit leaves."""

    place: int  # of its task among those that were sent out
    upload: Upload | None = None  # the update itself travels apart
    logged: tuple[LogCall | LoggerCall, ...] = ()
    optimizers: Mapping[str, Any] | None = None  # state to keep
    stops: bool = False  # its training asked the trainer to stop
    error: BaseException | None = None
    trace: str = ""  # of the error, in words
    warned: tuple[tuple[str, type[Warning], str, int], ...] = ()  # text, category, file and line
    update: Tensor | None = None  # where no memory is shared
    flaw: str = ""  # why the round's updates cannot be used, where one client has found it


def packed(outcome: VisitOutcome) -> bytes:
    """An outcome on its way, or what to say of one that cannot travel."""
    try:
        return pack(outcome)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        reason = f"what clients log or send must be something that can be pickled, found {error}"
        return pack(VisitOutcome(outcome.place, error=ModuleError(f"{reason}: use executor=Sequential()")))


class VisitRecorder:
    """Trains clients in a copy of the fit, which stays as it is."""

    def __init__(self, clients: ClientRunner) -> None:
        self._clients = clients

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While it lasts, what is logged is written down, and others stand in for the trainer's loggers."""
        trainer, clients = self._clients.trainer, self._clients
        loggers, own, self._log = trainer.loggers, clients.local.log, LogRecorder(clients.module)
        trainer.loggers = [LoggerStandIn(logger, i, self._log) for i, logger in enumerate(loggers)]  # type: ignore[misc]
        clients.local.log = self._log
        try:
            with clients.isolation.pinned():
                yield
        finally:
            trainer.loggers, clients.local.log = loggers, own

    def visit(self, task: ClientTask, place: int) -> VisitOutcome:
        """Trains a client."""
        clients, trainer = self._clients, self._clients.trainer
        assert task.client_id is not None
        self._log.calls = []
        upload, error, trace, optimizers = None, None, "", None
        stopped = trainer.should_stop
        with _noted_warnings() as warned:
            try:
                upload = clients.train(task)
                optimizers = clients.optimizers.pop_pending(task.client_id)
            except BaseException as raised:  # an interrupt as well: the fit raises it when the client's turn comes
                upload, error, trace = None, portable(raised), traceback.format_exc()
            clients.restore()
        stops, trainer.should_stop = trainer.should_stop and not stopped, stopped
        return VisitOutcome(
            place, upload, tuple(self._log.calls), optimizers, stops, error, trace, tuple(warned)
        )  # fmt: skip


class OutcomeReplayer:
    """Lets happen here what happened in a copy."""

    def __init__(self, clients: ClientRunner) -> None:
        self._clients = clients
        self._warned: dict[str, dict[Any, Any]] = {}

    def replay(self, task: ClientTask, outcome: VisitOutcome) -> Upload:
        """Takes over a client whose turn it is, its error too; its update must be in its row already."""
        clients = self._clients
        assert task.client_id is not None
        for text, category, filename, line in outcome.warned:
            warnings.warn_explicit(text, category, filename, line, registry=self._warned.setdefault(filename, {}))
        for call in outcome.logged:
            if isinstance(call, LogCall):
                replay(clients.module, clients.local.log, call, clients.loop.expect)
            else:
                call.repeat(clients.trainer.loggers)
        clients.trainer.should_stop = clients.trainer.should_stop or outcome.stops
        if outcome.error is not None:
            raise outcome.error from (_ElsewhereError(outcome.trace) if outcome.trace else None)
        assert outcome.upload is not None
        clients.optimizers.set_pending(task.client_id, outcome.optimizers)
        clients.rows.received(task.index)
        return outcome.upload


_E = TypeVar("_E", bound=BaseException)


class _ElsewhereError(Exception):
    """Where in another process an error came from."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@contextlib.contextmanager
def _noted_warnings() -> Iterator[list[tuple[str, type[Warning], str, int]]]:
    """Keeps warnings that the filters let through, as text, category, file and line, instead of showing them."""
    noted: list[tuple[str, type[Warning], str, int]] = []

    def note(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        noted.append((str(message), category, filename, lineno))

    shown, warnings.showwarning = warnings.showwarning, note  # type: ignore[assignment]
    try:
        yield noted
    finally:
        warnings.showwarning = shown


def portable(error: _E) -> _E | RuntimeError:
    """The error itself if it survives being sent, else one of the same name and message."""
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


class LogRecorder(TrainingLog):
    """Stands in for the module's ``log`` and keeps its calls, and those of loggers, in their order."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__(module)
        self.calls: list[LogCall | LoggerCall] = []
        self._names = {id(part): name for name, part in submodules(module) if isinstance(part, Metric)}

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """See :meth:`lightning.pytorch.LightningModule.log`."""
        if isinstance(value, Metric):
            if id(value) not in self._names:
                raise ModuleError(
                    f"metric objects that {type(self._module).__name__} logs must be submodules where clients train in "
                    f"other processes, found another one for {name!r}"
                )
            value = LoggedMetric(self._names[id(value)], last_value(value))
        value = value.detach().clone() if isinstance(value, Tensor) else value
        size = self._module.trainer.fit_loop.epoch_loop.batch_size
        self.calls.append(LogCall(current_hook(self._module), size, name, value, args, kwargs))


class LoggerCall:
    """A call of something that a logger has, such as ``logger.experiment.add_image(...)``."""

    def __init__(self, place: int, path: tuple[tuple[bool, Any], ...], args: Any, kwargs: Any) -> None:
        # Place of the logger among the trainer's, and the attributes and items (True) that lead to what is called.
        self._place, self._path, self._given = place, path, pack((args, kwargs))

    def repeat(self, loggers: list[Any]) -> None:
        """Calls it on the logger itself."""
        target = loggers[self._place]
        for is_item, name in self._path:
            target = target[name] if is_item else getattr(target, name)
        args, kwargs = unpack(self._given, torch.device("cpu"))
        target(*args, **kwargs)


class LoggerStandIn:
    """Takes the place of a logger, whose files and threads are the fit's own. Calls are noted, and give ``None``."""

    def __init__(
        self, logger: Any, place: int, calls: LogRecorder, path: tuple[tuple[bool, Any], ...] = ()
    ) -> None:  # fmt: skip
        vars(self).update(_logger=logger, _place=place, _calls=calls, _path=path)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """People ask which logger they have."""
        return type(self._logger) if not self._path else LoggerStandIn

    def __getattr__(self, name: str) -> Any:
        """A setting of the logger, or what stands in for anything else of it."""
        if name.startswith("__"):
            raise AttributeError(name)
        if not self._path and name != "experiment":
            value = getattr(self._logger, name)
            if isinstance(value, PLAIN):
                return value
        return self._step(False, name)

    def __getitem__(self, key: Any) -> Any:
        return self._step(True, key)

    def _step(self, is_item: bool, name: Any) -> LoggerStandIn:
        return LoggerStandIn(self._logger, self._place, self._calls, (*self._path, (is_item, name)))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Notes the call."""
        self._calls.calls.append(LoggerCall(self._place, self._path, args, kwargs))
