# SPDX-License-Identifier: Apache-2.0
"""How the clients of a round are run: what an executor offers a fit, and the one that runs them one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fl_lightning.algorithms.base import obstacle
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.client_runner import ClientRunner
from fl_lightning.clients.update_rows import SummedRows, UpdateRows, Upload
from fl_lightning.clients.visits import OutcomeReplayer, VisitOutcome
from fl_lightning.core.tensors import empty_rows
from fl_lightning.lightning.batches import ClientTask
from fl_lightning.lightning.inspection import profiler_of, step_hooks, users_callback
from fl_lightning.lightning.names import rank_zero_info


class CohortExecutor(ABC):
    """Runs the clients of a fit. It holds settings alone, so one object serves any number of fits."""

    def obstacle(self, clients: ClientRunner) -> str | None:
        """Why this fit's clients have to train one after the other in this process; ``None`` if they need not."""
        return None

    @abstractmethod
    def runner(self, clients: ClientRunner) -> CohortRunner:
        """Makes the object that runs the rounds of the fit whose single clients ``clients`` trains."""

    def update_rows(self, binding: BoundParameters, capacity: int) -> UpdateRows:
        """Makes the matrix of a round's updates, for at most ``capacity`` clients."""
        return UpdateRows(binding, capacity, self.rows)

    def rows(self, number: int, like: Tensor) -> Tensor:
        """Allocates uninitialised memory ``[number, n]`` for the updates of a round, in contiguous rows.

        ``like [n]`` are the global parameters, whose dtype and device the rows have. Here every row starts at a 64-byte
        boundary. Other memory gives the same bits.
        """
        return empty_rows(number, like)


def bound_here(clients: ClientRunner) -> str | None:
    """Why a fit's clients cannot train in other processes, as a sentence; ``None`` if they can."""
    trainer, callbacks = clients.trainer, clients.trainer.callbacks  # type: ignore[attr-defined]
    profiler = profiler_of(trainer)
    if profiler is not None:
        return f"Trainer(profiler={profiler}) would not see what happens in worker processes"
    hook = next(step_hooks(callbacks), None)
    if hook is not None:
        return f"{hook} would run in worker processes"
    between = users_callback(callbacks, "on_train_batch_start", "on_train_batch_end")
    if between is not None:
        return f"worker processes would not see what {type(between).__name__} does between two clients"
    return obstacle(clients.rule) or next(iter(clients.isolation.unfollowed()), None)


class CohortRunner(ABC):
    """Trains the clients of one fit, round by round.

    ``fallback`` says why clients train one after the other although the executor was made for something else.
    """

    fallback: str | None = None

    def begin_round(self, tasks: Sequence[ClientTask]) -> None:
        """These clients will train, in the order in which :meth:`train` asks for them.

        Those that dropped out or have no data are not among them. Nothing is to be trained yet: callbacks may still
        change the module.
        """

    @abstractmethod
    def train(self, task: ClientTask) -> Upload:
        """Hands over what training one client gave; called once per task, in order, with the global model bound.

        Row ``task.index`` of the round's rows then holds the client's update. Everything that the client left behind
        has happened in this process: its steps are counted, what it logged is logged, its optimizer state and what its
        rule needs for ``commit`` are in their places (:class:`clients.visits.OutcomeReplayer`). The caller puts
        parameters, buffers and optimizers back, also after an error. What the client's training raised is raised here;
        the round may go on with the next task.
        """

    def losses(self, clients: Sequence[int], measure: Callable[[int], float]) -> list[float]:
        """Losses of clients at other parameters, for methods that ask again; ``measure`` gives that of one client."""
        return [measure(client) for client in clients]

    def end_round(self) -> None:
        """All tasks were handed over; called before the updates are combined.

        A ValueError is what :meth:`ClientRunner.check_round` says in another process that has trained clients.
        """

    def close(self) -> None:
        """The fit is over, however it ended, perhaps in the middle of a round; may be called again."""


@dataclass(frozen=True)
class Sequential(CohortExecutor):
    """Trains one client after the other in this process; works for every module, rule and device."""

    def runner(self, clients: ClientRunner) -> CohortRunner:
        """See :meth:`CohortExecutor.runner`."""
        return SequentialRunner(clients)


@dataclass(frozen=True)
class AddingUp(Sequential):
    """Adds up the updates of clients that train one after the other, where nothing reads single ones."""

    def update_rows(self, binding: BoundParameters, capacity: int) -> UpdateRows:
        """See :meth:`CohortExecutor.update_rows`."""
        return SummedRows(binding, capacity)


class SequentialRunner(CohortRunner):
    """Trains every client when the fit asks for it."""

    def __init__(self, clients: ClientRunner, fallback: str | None = None) -> None:
        self._clients, self.fallback = clients, fallback

    def train(self, task: ClientTask) -> Upload:
        """Trains the client on the bound module."""
        return self._clients.train(task)


class DispatchingRunner(CohortRunner):
    """Lets others train the clients of a round, in any order, and hands over in order what they left behind.

    An outcome has no effect here before the client's turn, and every visit begins with the module as the round found
    it: where nobody else can train, this process trains the clients that are left.
    """

    min_clients = 1  # clients of a round that are worth it

    def __init__(self, clients: ClientRunner, name: str) -> None:
        self._clients, self._name, self._replayer = clients, name, OutcomeReplayer(clients)
        self._forget()

    def _forget(self, tasks: Sequence[ClientTask] = ()) -> None:
        self._tasks, self._current = list(tasks), -1  # place of the client that is being handed over
        self._results: dict[int, VisitOutcome] = {}
        self._flaw = ""  # why the round's updates cannot be used

    @abstractmethod
    def dispatch(self, places: list[int]) -> None:
        """The round's first client is asked for: lets others train those at these places, the longest first."""

    @abstractmethod
    def receive(self) -> None:
        """Waits for results, of one client or more."""

    def begin_round(self, tasks: Sequence[ClientTask]) -> None:
        """Others begin when the first client is asked for."""
        self._forget(tasks)

    def train(self, task: ClientTask) -> Upload:
        """Hands over the next client as soon as it is trained."""
        self._current += 1
        if self.fallback is None and len(self._tasks) >= self.min_clients:
            try:
                if self._current == 0:
                    self._clients.isolation.take_snapshot()  # copies and the module give objects the same numbers
                    costs = [self._clients.expected_cost(task) for task in self._tasks]
                    self.dispatch(sorted(range(len(costs)), key=lambda place: (-costs[place], place)))
                while self._current not in self._results and self.fallback is None:
                    self.receive()
            except Exception as error:
                # No client has failed here, so none may be dropped for it: what clients raise comes with their results.
                self.fall_back(f"{type(error).__name__} between this process and its workers: {error}")
            except BaseException:
                self.close()
                raise
        if self._current not in self._results:
            return self._clients.train(task)
        outcome = self._results.pop(self._current)
        if outcome.upload is not None and outcome.update is not None:
            self._clients.rows.row(task.index).copy_(outcome.update)
            outcome = replace(outcome, upload=replace(outcome.upload, index=task.index))
        return self._replayer.replay(task, outcome)

    def end_round(self) -> None:
        """See :meth:`CohortRunner.end_round`."""
        if self._flaw:
            raise ValueError(self._flaw)

    def fall_back(self, reason: str) -> None:
        """Trains this client and all that follow in this process; those handed over have left no such trace."""
        self.close()
        self._results, self.fallback = {}, reason
        rank_zero_info(f"{self._name} trains this fit's clients one after the other from now on: {reason}")
