# SPDX-License-Identifier: Apache-2.0
"""Requests to stop that one process of a fit gets, and that all of them follow at the same point."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from fl_lightning.lightning.module.shadowed import shadowed
from fl_lightning.lightning.names import Trainer, lightning_module

Requests = frozenset[str]
"""What a process was asked to do: some of ``"should_stop"``, ``"terminate"`` and ``"requeue"``."""


def is_termination(exception: BaseException) -> bool:
    """Whether a fit ends because all its processes were asked to."""
    return isinstance(exception, lightning_module("utilities.exceptions").SIGTERMException)


class HeldSignals:
    """Holds signals back that Lightning would act on in the process that gets them.

    SIGTERM ends a fit, and SLURM's SIGUSR1 saves a checkpoint and puts the job into the queue again. Both need all
    processes: one that left alone, or saved alone, would keep the others waiting. A process that has such a request
    begins no further client, and tells the others at the next exchange.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._noted = set[str]()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """While it lasts, the handlers that Lightning registers, after a strategy's setup, only note a signal."""
        connector = self._trainer._signal_connector
        with shadowed(connector, _sigterm_notifier_fn=self._terminate, _slurm_sigusr_handler_fn=self._requeue):
            yield

    def _terminate(self, *_: Any) -> None:
        self._noted.add("terminate")

    def _requeue(self, *_: Any) -> None:
        self._noted.add("requeue")

    @property
    def urgent(self) -> bool:
        """Whether this process has got a signal that the others may not know of."""
        return bool(self._noted)

    @property
    def requests(self) -> Requests:
        """What this process was asked to do."""
        return frozenset({*self._noted, *(["should_stop"] if self._trainer.should_stop else [])})

    def follow(self, requests: Iterable[Requests], between_clients: bool, ends_round: bool) -> None:
        """All processes do what any of them was asked to do; they call this at the same point.

        Args:
            requests: those of all processes.
            between_clients: clients of the round are left.
            ends_round: nothing of the round is left. A round whose clients are all trained is brought to its end.

        Raises:
            SystemExit: Lightning's own of SIGTERM, which lets callbacks save a checkpoint.
        """
        asked = Requests().union(*requests)
        connector = self._trainer._signal_connector
        if "should_stop" in asked:
            self._trainer.should_stop = True
        if "requeue" in asked:
            self._noted.discard("requeue")
            type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, None)
        if "terminate" in asked and between_clients:
            raise lightning_module("utilities.exceptions").SIGTERMException
        if "terminate" in asked and ends_round:
            connector.received_sigterm = True  # Lightning ends the fit when it has logged the round
