# SPDX-License-Identifier: Apache-2.0
"""One client after the other, in this process."""

from __future__ import annotations

from dataclasses import dataclass

from fl_lightning.clients.base import CohortRunner, Executor
from fl_lightning.clients.client_runner import ClientRunner
from fl_lightning.clients.upload import Upload
from fl_lightning.lightning.batches import ClientTask


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
