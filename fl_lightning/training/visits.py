# SPDX-License-Identifier: Apache-2.0
"""A client's visit that is written down where the client trains, and repeated in the fit when its turn comes."""

from __future__ import annotations

import contextlib
import pickle
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fl_lightning.core.fingerprint import Fingerprint, is_metric
from fl_lightning.core.lightning.epoch_loop import ClientTask
from fl_lightning.core.lightning.process_copy import replaced_metrics
from fl_lightning.core.list_names import ListName, find_list
from fl_lightning.training.client_runner import ClientRunner
from fl_lightning.training.gathering import Gathering
from fl_lightning.training.process_copies import ClientTraces, RoundState
from fl_lightning.training.recorders import LogRecorder, RefusedLogger, WatchedMetrics
from fl_lightning.training.upload import Upload


@dataclass(frozen=True)
class RoundOrder:
    """A round, as far as copies of the fit cannot know it; the global parameters travel apart.

    Attributes:
        tasks: the round's clients.
        state: where the fit is between its clients.
        gathering: lists of the module that clients are known to add to.
    """

    tasks: list[ClientTask]
    state: RoundState
    gathering: tuple[ListName, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a client in a copy of the fit.

    Attributes:
        place: of its task among the round's tasks.
        upload: what it sends; the update itself travels apart.
        traces: what it left behind beside that; ``None`` if its process died.
        error: what its training raised.
        trace: where, in words.
        warned: warnings as text, category, file and line.
        changed: why the fit itself must train it: its training changed an object that is not shared with the copy.
        gathering: lists that it added to and that the round's order does not name. If :meth:`Replays.learn` says so,
            copies can train it after all, and all clients whose turn is yet to come, under the order of a new
            :meth:`Replays.begin_round`.
    """

    place: int
    upload: Upload | None = None
    traces: ClientTraces | None = None
    error: BaseException | None = None
    trace: str = ""
    warned: tuple[tuple[str, type[Warning], str, int], ...] = ()
    changed: str = ""
    gathering: tuple[ListName, ...] = ()


class Visits:
    """Trains clients and writes down what they leave behind, instead of letting it happen.

    Args:
        clients: trains the clients: that of the fit itself, or of a copy of it.
    """

    def __init__(self, clients: ClientRunner) -> None:
        self._clients = clients
        self._log = LogRecorder(clients.module)
        self._loggers: list[RefusedLogger] = []
        self._metrics: list[WatchedMetrics] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While it lasts, others stand in for the trainer's loggers, for metrics, and for ``self.log``."""
        trainer, copies = self._clients.trainer, self._clients.copies
        loggers, self._gathering = trainer.loggers, Gathering(self._clients.module)
        self._loggers = [RefusedLogger() for _ in loggers]
        with replaced_metrics(trainer, WatchedMetrics) as self._metrics, copies.recording_log(self._log):
            trainer.loggers = self._loggers  # type: ignore[assignment]
            self._before = self._fingerprint()
            try:
                yield
            finally:
                trainer.loggers = loggers
                self._gathering.undo()

    def begin_round(self, order: RoundOrder) -> None:
        """Takes a round, which ``clients`` know already: see :meth:`ProcessCopies.load_round_state`."""
        self._order = order
        if self._gathering.watch(order.gathering) or order.state.schedulers:
            self._before = self._fingerprint()

    def visit(self, place: int) -> Outcome:
        """Trains the client at a place; the copy is as it was then, unless the outcome says ``changed``."""
        order, clients, log = self._order, self._clients, self._log
        task = order.tasks[place]
        assert task.client_id is not None
        log.calls, log.metric = [], ""
        upload, error, trace = None, None, ""
        gathering: tuple[ListName, ...] = ()
        with _noted_warnings() as warned:
            try:
                upload = clients.train(task)
            except BaseException as raised:
                error, trace = portable(raised), traceback.format_exc()
            gathered, read = self._gathering.end()
            traces = clients.copies.traces_of(task.client_id, log.calls, gathered, failed=error is not None)
            clients.restore(failed=error is not None)
            changed = log.metric or read or self._changes()
            if changed and (gathering := self._gathering.cut()) and self._changes():
                gathering = ()  # it is not all that has changed
        return Outcome(place, upload, traces, error, trace, tuple(warned), changed, gathering)

    def _fingerprint(self) -> Fingerprint:
        trainer, found = self._clients.trainer, Fingerprint(self._gathering.apart)
        found.add_module(self._clients.module, metrics=True)
        found.add("trainer.should_stop", trainer.should_stop)
        for index, config in enumerate(trainer.lr_scheduler_configs):
            found.add(f"lr_scheduler_configs[{index}]", config.scheduler.state_dict())
        return found

    def _changes(self) -> str:
        if any(logger.touched for logger in self._loggers):
            return "uses a logger directly"
        if any(metrics.touched for metrics in self._metrics):
            return "looks at the trainer's metrics"
        names = self._before.changes(self._fingerprint())
        if not names:
            return ""
        return f"changes {'metric' if is_metric(self._clients.module, names[0]) else 'attribute'} {names[0]!r}"


class Replays:
    """Plans rounds for copies of the fit, and lets happen here what happened there.

    Args:
        clients: trains the fit's clients.
    """

    def __init__(self, clients: ClientRunner) -> None:
        self._clients = clients
        self._warned: dict[str, dict[Any, Any]] = {}
        self._gathering: dict[ListName, None] = {}

    def present(self) -> Fingerprint:
        """What copies have of the fit and do not hear about when it changes."""
        clients = self._clients
        gathered = [find_list(clients.module, name) for name in self._gathering]  # copies need not know what is in it
        found = Fingerprint([*gathered, *clients.generators])
        found.add_module(clients.module, metrics=False)
        found.add_structure(clients.module)
        for name, value in clients.copies.objects().items():
            found.add(name, value)
        return found

    def learn(self, outcome: Outcome) -> bool:
        """Whether a client that ``changed`` something can be trained by a copy under a new order."""
        new = [name for name in outcome.gathering if name not in self._gathering]
        self._gathering |= dict.fromkeys(new)
        return bool(new)

    def begin_round(self, tasks: Sequence[ClientTask]) -> RoundOrder:
        """What copies need to train clients of the round from here on."""
        self._order = RoundOrder(list(tasks), self._clients.copies.round_state(), tuple(self._gathering))
        return self._order

    def replay(self, outcome: Outcome) -> Upload:
        """Takes over a client whose turn it is; its update must be in its row already.

        Raises:
            BaseException: what the client's training raised.
        """
        clients, task = self._clients, self._order.tasks[outcome.place]
        for text, category, filename, line in outcome.warned:
            warnings.warn_explicit(text, category, filename, line, registry=self._warned.setdefault(filename, {}))
        if outcome.traces is not None:
            assert task.client_id is not None
            clients.copies.replay(task.client_id, outcome.traces)
        if outcome.error is not None:
            raise outcome.error from (_ElsewhereError(outcome.trace) if outcome.trace else None)
        assert outcome.upload is not None
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
