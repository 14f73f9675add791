# SPDX-License-Identifier: Apache-2.0
"""One client after the other, in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fl_lightning.executors.base import Crew, Executor

if TYPE_CHECKING:
    from fl_lightning.bench import Bench
    from fl_lightning.loop import ClientTask
    from fl_lightning.reports import Arrival


@dataclass(frozen=True)
class Sequential(Executor):
    """Trains one client after the other in this process; works for every module, rule and device."""

    def crew(self, bench: Bench) -> Crew:
        """Trains on the bench itself."""
        return Alone(bench)


class Alone(Crew):
    """Trains every client when it is asked for."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def train(self, task: ClientTask) -> Arrival:
        """Trains the client on the bound module."""
        return self._bench.visit(task)
