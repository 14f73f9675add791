# SPDX-License-Identifier: Apache-2.0
"""The processes of a fit as the operating system sees them: how they start and end, and what signals ask of them."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from fl_lightning.core.modules import shadowed
from fl_lightning.core.processes import end_with_parent
from fl_lightning.lightning.names import Trainer, lightning_module

_START = timedelta(minutes=10)
"""How long others may take to start, whatever they may take later."""
_STARTER = "FL_LIGHTNING_STARTER"
"""Environment variable: the id of the process that has started this one."""
_GRACE = 10.0
"""Seconds in which processes that were started from here may end by themselves."""
Requests = frozenset[str]
"""What a process was asked to do: some of ``"should_stop"``, ``"terminate"`` and ``"requeue"``."""


def check_startable(environment: Any) -> None:
    """Checks that Lightning can start processes here, unless somebody else does."""
    if environment.creates_processes_externally:
        return
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    named = getattr(sys.modules["__main__"], "__spec__", None) is not None
    if interactive or not (named or os.path.isfile(sys.argv[0])):
        found = "an interactive Python" if interactive else f"a program without a file ({sys.argv[0] or 'stdin'})"
        raise ValueError(
            "Trainer(devices=..., num_nodes=...) with several processes must be run by a script, which each process "
            f"runs from its beginning, found {found}: save the program as a file, or use one device and "
            "FederatedStrategy(executor=fl_lightning.executors.Parallel(workers=...)), which works in notebooks"
        )


def announce(environment: Any) -> None:
    """Lets the processes that Lightning will start from here know who has started them."""
    if not environment.creates_processes_externally:
        os.environ[_STARTER] = str(os.getpid())


def end_with_starter(environment: Any) -> None:
    """From here on this process ends with the one that has started it, if that was done by Lightning.

    Processes of torchrun or of a cluster's scheduler are theirs to end.
    """
    starter = int(os.environ.get(_STARTER, "0"))
    own = isinstance(environment, lightning_module("plugins.environments").LightningEnvironment)
    if not own or starter in (0, os.getpid()):
        return
    if os.getppid() == starter or not _is_alive(starter):  # else the variable came down from further up
        end_with_parent(starter)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def connect(backend: str, address: tuple[str, int], rank: int, size: int, timeout: timedelta) -> None:
    """Connects this process with the others until the program ends; waits at least 10 minutes for them to come."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address[0], str(address[1])
    patience = max(timeout, _START)
    rendezvous_store, _, _ = next(rendezvous("env://", rank, size, timeout=patience))
    store = _fresh_store(rendezvous_store, address[0], rank, patience)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    atexit.register(_disconnect)


def _fresh_store(rendezvous_store: Any, host: str, rank: int, patience: timedelta) -> Any:
    """A store without a past. torchrun starts a fit again with one that still has the addresses of the dead."""
    if rank == 0:
        store = TCPStore(host, 0, is_master=True, timeout=patience, wait_for_workers=False)
        rendezvous_store.set("fl_lightning", str(store.port))
        return store
    end = time.monotonic() + patience.total_seconds()
    while True:
        port = int(rendezvous_store.get("fl_lightning"))
        try:
            return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
        except RuntimeError:  # this is the port of a dead process, and the first rank is yet to come
            if time.monotonic() > end:
                raise


def _disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def end_at_exit(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """A fit has failed: processes that this one has started do not outlive it, even if they hang."""
    atexit.register(_end, list(processes))


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    _disconnect()  # those that wait for this process end with an error of their own
    end = time.monotonic() + _GRACE
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
        if process.returncode is None:
            process.kill()
            process.wait()


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
        """All processes do what any of them (``requests``) was asked to do; they call this at the same point.

        SIGTERM ends a fit ``between_clients`` of a round by Lightning's own SystemExit, which lets callbacks save a
        checkpoint. A round whose clients are all trained is brought to its end.
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
