# SPDX-License-Identifier: Apache-2.0
"""How the clients of a round are run: what an executor offers a fit, and the one that runs them one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.client_runner import ClientRunner
from fl_lightning.clients.update_rows import UpdateRows, Upload
from fl_lightning.core.tensors import empty_rows
from fl_lightning.lightning.batches import ClientTask


class Executor(ABC):
    """Runs the clients of a fit. An executor holds settings alone, so one object serves any number of fits."""

    def obstacle(self, clients: ClientRunner) -> str | None:
        """Why this fit's clients have to train one after the other in this process; ``None`` if they need not.

        The fit then logs the sentence once and uses :class:`Sequential`.

        Args:
            clients: trains single clients of the fit that is about to begin.
        """
        return None

    @abstractmethod
    def runner(self, clients: ClientRunner) -> CohortRunner:
        """Makes the object that runs the rounds of one fit.

        Args:
            clients: trains single clients of that fit.
        """

    def update_rows(self, binding: BoundParameters, capacity: int) -> UpdateRows:
        """Makes the matrix of a round's updates.

        Args:
            binding: the bound module.
            capacity: the largest number of clients in a round.
        """
        return UpdateRows(binding, capacity, self.rows)

    def rows(self, number: int, like: Tensor) -> Tensor:
        """Allocates uninitialised memory for the updates ``[number, n]`` of a round, whose rows are contiguous.

        Here every row starts at a 64-byte boundary. Other memory gives the same bits.

        Args:
            number: the largest number of clients in a round.
            like: ``[n]`` the global parameters, whose dtype and device the rows have.
        """
        return empty_rows(number, like)


class CohortRunner(ABC):
    """Trains the clients of one fit, round by round.

    Attributes:
        fallback: why clients train one after the other although the executor was made for something else, or ``None``.
    """

    fallback: str | None = None

    def begin_round(self, tasks: Sequence[ClientTask]) -> None:
        """The cohort is known. Nothing is to be trained yet: callbacks may still change the module.

        Args:
            tasks: the clients that will train, in the order in which :meth:`train` asks for them; clients that dropped
                out or have no data are not among them.
        """

    @abstractmethod
    def train(self, task: ClientTask) -> Upload:
        """Hands over what training one client gave; called once per task, in order, with the global model bound.

        Row ``task.index`` of the round's rows then holds the client's update. Everything that the client left behind
        has happened in this process: its steps are counted, what it logged is logged, its optimizer state and what its
        rule needs for ``commit`` are in their places (``clients.visits.Replays`` does all that). The caller puts
        parameters, buffers and optimizers back, also after an error.

        Raises:
            Exception: what the client's training raised; the round may go on with the next task.
        """

    def losses(self, clients: Sequence[int], measure: Callable[[int], float]) -> list[float]:
        """Losses of clients at other parameters, for methods that ask again.

        Args:
            clients: in the order of the losses.
            measure: gives the loss of one client; the order of calls has no effect on it.
        """
        return [measure(client) for client in clients]

    def end_round(self) -> None:
        """All tasks were handed over; called before the updates are combined.

        Raises:
            ValueError: what :meth:`ClientRunner.check_round` says in another process that has trained clients.
        """

    def close(self) -> None:
        """The fit is over, however it ended, perhaps in the middle of a round; may be called again."""


@dataclass(frozen=True)
class Sequential(Executor):
    """Trains one client after the other in this process; works for every module, rule and device."""

    def runner(self, clients: ClientRunner) -> CohortRunner:
        """See :meth:`Executor.runner`."""
        return SequentialRunner(clients)


class SequentialRunner(CohortRunner):
    """Trains every client when the fit asks for it."""

    def __init__(self, clients: ClientRunner, fallback: str | None = None) -> None:
        self._clients, self.fallback = clients, fallback

    def train(self, task: ClientTask) -> Upload:
        """Trains the client on the bound module."""
        return self._clients.train(task)
