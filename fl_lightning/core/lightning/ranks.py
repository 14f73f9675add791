# SPDX-License-Identifier: Apache-2.0
"""Several processes that run one fit together: Lightning starts them, ``torch.distributed`` connects them.

Every process (a *rank*) runs the whole fit. Only what clients compute is divided. To modules and callbacks it stays one
fit on one device: ``trainer.world_size`` is 1, and there is nothing to average over ranks.
"""

from __future__ import annotations

import io
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchmetrics import Metric

from fl_lightning.core.errors import RankError
from fl_lightning.core.lightning.names import lightning_module
from fl_lightning.core.lightning.rank_processes import connect, end_at_exit
from fl_lightning.core.lightning.rank_signals import HeldSignals
from fl_lightning.core.modules import submodules

_T = TypeVar("_T")


class Ranks:
    """This process's place among the processes of a fit, and what it exchanges with the others.

    Lightning's ``DDPStrategy`` lends its launcher and the numbering of ranks, so processes are started as for DDP: by
    the script itself, by torchrun, or by a cluster's scheduler. Nothing else of DDP takes part.

    Args:
        accelerator: the trainer's.
        devices: one device per process of this machine.
        environment: the trainer's cluster environment.
        num_nodes: machines.
        timeout: longest wait for another rank. A rank waits while others train their last clients.

    Attributes:
        rank: of this process.
        local_rank: of this process, on its machine.
        node_rank: of this machine.
        size: processes in all.
        num_nodes: machines.
        device: of this process.
        signals: requests to stop that this process gets during a fit.
    """

    def __init__(
        self, accelerator: Any, devices: Sequence[torch.device], environment: Any, num_nodes: int, timeout: timedelta
    ) -> None:
        lender = lightning_module("strategies").DDPStrategy(
            accelerator=accelerator, parallel_devices=list(devices), cluster_environment=environment
        )
        lender.num_nodes = num_nodes
        lender.set_world_ranks()
        lender._configure_launcher()
        self._environment, self._timeout = environment, timeout
        self.launcher = lender.launcher
        self.rank, self.local_rank, self.node_rank = lender.global_rank, lender.local_rank, lender.node_rank
        self.size, self.num_nodes = num_nodes * len(devices), num_nodes
        self.device = devices[self.local_rank]
        self.signals: HeldSignals | None = None
        self._store: Any = None
        self._divisions = self._exchanges = 0
        self._left = False

    def join(self) -> None:
        """Connects this process with the others, and gives all of them the random state of the first.

        Raises:
            RuntimeError: the script has connected another number of processes.
        """
        if not dist.is_initialized():
            backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
            address = self._environment.main_address, self._environment.main_port
            with self._answered():
                connect(backend, address, self.rank, self.size, self._timeout)
        if dist.get_world_size() != self.size:
            raise RuntimeError(
                f"Trainer(devices=..., num_nodes=...) asks for {self.size} processes, and this script has connected "
                f"{dist.get_world_size()}: use the same number in all its trainers"
            )
        if self._store is None:
            self._store = self._shared_store()
        self._left = False
        self._share_random_state()

    def _shared_store(self) -> Any:
        """Counters that all ranks see; the first rank keeps them."""
        host, wait = self._environment.main_address, self._timeout
        if self.rank == 0:
            store = TCPStore(host, 0, is_master=True, timeout=wait, wait_for_workers=False)
            self.broadcast(store.port)
            return store
        port = self.broadcast(0)
        return TCPStore(host, port, is_master=False, timeout=wait)

    def _share_random_state(self) -> None:
        python, numeric, generator = self.broadcast((random.getstate(), np.random.get_state(), torch.get_rng_state()))
        random.setstate(python)
        np.random.set_state(numeric)
        torch.set_rng_state(generator)
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.broadcast(torch.cuda.get_rng_state(self.device)), self.device)

    # ---- exchange

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self._store is not None and not self._left:
            self.gather(None)

    def broadcast(self, value: _T, source: int = 0) -> _T:
        """The value of one rank, on all."""
        if self._left:
            return value
        box = [value]
        with self._meeting():
            dist.broadcast_object_list(box, source, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: _T) -> list[_T]:
        """Every rank's value, in the order of ranks, on all ranks; tensors come to this process's device."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        found: list[Any] = [None] * self.size
        with self._meeting():
            dist.all_gather_object(found, buffer.getvalue())
        return [torch.load(io.BytesIO(part), self.device, weights_only=False) for part in found]

    def send_row(self, row: Tensor, source: int) -> None:
        """Overwrites a tensor on all ranks with that of one."""
        with self._answered():
            dist.broadcast(row, source)

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Around what all ranks do together; leaves a note that this rank has come."""
        self._exchanges += 1
        with self._answered():
            if self._store is not None:
                self._store.set(f"rank {self.rank}", str(self._exchanges))
            yield

    @contextmanager
    def _answered(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            waited, missing = time.monotonic() - began, self._missing()
            words = f"rank {self.rank} of {self.size} waits for {missing}, which "
            if waited < 0.9 * self._timeout.total_seconds():
                raise RankError(f"{words}has ended: its own output says why") from error
            raise RankError(
                f"{words}has not answered for {self._timeout} (timeout of FederatedStrategy): it hangs, or its clients "
                "take longer than that"
            ) from error

    def _missing(self) -> str:
        """Who has not come to the exchange at which this rank waits."""
        late = list[int]()
        with suppress(RuntimeError):  # the first rank, which knows, has ended
            for rank in range(self.size if self._store is not None else 0):
                note = f"rank {rank}"
                if not self._store.check([note]) or int(self._store.get(note)) < self._exchanges:
                    late.append(rank)
        names = [f"rank {rank}" for rank in late if rank != self.rank]
        return " and ".join(names) or "another process of this fit"

    def abandon(self) -> None:
        """This process leaves the fit with an error of its own.

        It waits for nobody any more, so that callbacks can still save a checkpoint. Processes that it has started end
        when it does.
        """
        if not self._left:
            end_at_exit(getattr(self.launcher, "procs", []))
        self._left = True

    def follow_requests(self, between_clients: bool = False, ends_round: bool = False) -> None:
        """All ranks do what callbacks or signals have asked of any of them.

        Args:
            between_clients: clients of the round are left.
            ends_round: nothing of the round is left.

        Raises:
            SystemExit: one rank was asked to terminate, and clients are left.
        """
        signals = self.signals
        assert signals is not None
        signals.follow(self.gather(signals.requests), between_clients, ends_round)

    def share_module(self, module: nn.Module) -> None:
        """Overwrites all parameters and buffers with those of the first rank.

        Raises:
            ValueError: a rank has others than the first.
        """
        named = [*module.named_parameters(), *module.named_buffers()]
        found = self.gather([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named])
        for rank, tensors in enumerate(found):
            if tensors != found[0]:
                first, other = next(pair for pair in zip_longest(found[0], tensors) if pair[0] != pair[1])
                raise ValueError(
                    f"all ranks must have the same parameters and buffers, found that rank {rank} has {other} where "
                    f"rank 0 has {first}"
                )
        with torch.no_grad():
            for _, tensor in named:
                whole = tensor.data.contiguous()
                dist.broadcast(whole, 0)
                if whole.data_ptr() != tensor.data_ptr():
                    tensor.data.copy_(whole)

    def claims(self, places: Sequence[int]) -> Iterator[int]:
        """Hands out places to whichever rank asks next; each goes to one rank.

        Args:
            places: in the order in which they are handed out, the same on all ranks.
        """
        self._divisions += 1  # counted here, not per fit: the store outlives a fit
        while True:
            leaving = self.signals is not None and self.signals.urgent
            with self._answered():  # who leaves takes all that is left, so that nobody begins another
                turn = self._store.add(f"division {self._divisions}", len(places) if leaving else 1) - 1
            if leaving or turn >= len(places):
                return
            yield places[turn]


@contextmanager
def metrics_apart(module: nn.Module) -> Iterator[None]:
    """Keeps torchmetrics in a module from joining what other ranks hold, which may be at other clients."""
    changed = [(m, m.distributed_available_fn) for _, m in submodules(module) if isinstance(m, Metric)]
    for metric, _ in changed:
        metric.distributed_available_fn = _alone
    try:
        yield
    finally:
        for metric, available in changed:
            metric.distributed_available_fn = available


@contextmanager
def epoch_logs_quiet() -> Iterator[None]:
    """Silences Lightning's advice to average logged values over ranks: they are those of all clients already."""
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self.log\(.*sync_dist=True")
    own = warnings.filters[0]
    try:
        yield
    finally:
        with suppress(ValueError):  # somebody has reset the filters
            warnings.filters.remove(own)  # type: ignore[attr-defined]


def _alone() -> bool:
    return False
