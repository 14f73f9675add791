# SPDX-License-Identifier: Apache-2.0
"""One client after the other, in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fl_lightning.executors.base import Executor, Runner

if TYPE_CHECKING:
    from fl_lightning.core.lightning.epoch_loop import ClientTask
    from fl_lightning.training.client_runner import ClientRunner
    from fl_lightning.training.upload import Upload


@dataclass(frozen=True)
class Sequential(Executor):
    """Trains one client after the other in this process; works for every module, rule and device."""

    def crew(self, bench: ClientRunner) -> Runner:
        """Trains on the bench itself."""
        return SequentialRunner(bench)


class SequentialRunner(Runner):
    """Trains every client when it is asked for."""

    def __init__(self, bench: ClientRunner) -> None:
        self._bench = bench

    def train(self, task: ClientTask) -> Upload:
        """Trains the client on the bound module."""
        return self._bench.visit(task)
