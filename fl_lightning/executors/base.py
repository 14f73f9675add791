# SPDX-License-Identifier: Apache-2.0
"""What the strategy asks of whoever trains the clients of a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fl_lightning.core.lightning.epoch_loop import ClientTask
    from fl_lightning.training.client_runner import ClientRunner
    from fl_lightning.training.upload import Upload


class Executor(ABC):
    """How the clients of a round are trained. Holds settings alone, so one object serves any number of fits."""

    def obstacle(self, bench: ClientRunner) -> str | None:
        """Why this fit's clients have to be trained one after the other in this process; ``None`` if they need not.

        The strategy then logs the sentence once and uses :class:`Sequential`.

        Args:
            bench: module, data and options of the fit that is about to begin.
        """
        return None

    @abstractmethod
    def crew(self, bench: ClientRunner) -> Runner:
        """Whoever trains the clients of one fit."""

    def rows(self, number: int, like: Tensor) -> Tensor:
        """Uninitialised memory for the updates ``[number, n]`` of a round.

        Args:
            number: the largest number of clients in a round.
            like: ``[n]`` the global parameters, whose dtype and device the rows have.
        """
        return torch.empty(number, like.numel(), dtype=like.dtype, device=like.device)


class Runner(ABC):
    """Trains the clients of one fit, round by round."""

    def begin_round(self, tasks: Sequence[ClientTask]) -> None:
        """The cohort is known. Nothing is to be trained yet: callbacks may still change the module.

        Args:
            tasks: the clients that will train, in the order in which :meth:`train` asks for them; clients that dropped
                out or have no data are not among them.
        """

    @abstractmethod
    def train(self, task: ClientTask) -> Upload:
        """Hands over what training one client gave; called once per task, in order, with the global model bound.

        Row ``task.index`` of the update matrix then holds the client's update, and everything that the client left
        behind has happened in this process: its steps are counted, what it logged is logged, its optimizer state and
        what its rule sets aside for ``commit`` are in their places.
        Parameters, buffers and optimizers are put back by the caller, also after an error.

        Raises:
            Exception: what the client's training raised; the round may go on with the next task.
        """

    def end_round(self) -> None:
        """All tasks were handed over; called before the updates are combined."""

    def close(self) -> None:
        """The fit is over, however it ended, perhaps in the middle of a round; may be called again."""
