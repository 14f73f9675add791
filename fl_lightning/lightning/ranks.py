# SPDX-License-Identifier: Apache-2.0
"""Several processes that run one fit together: Lightning starts them, ``torch.distributed`` connects them.

Every process (a *rank*) runs the whole fit. Only what clients compute is divided. To modules and callbacks it stays one
fit on one device: ``trainer.world_size`` is 1, and there is nothing to average over ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fl_lightning.core.errors import RankError
from fl_lightning.core.processes import outlive_parent, pack, unpack
from fl_lightning.lightning.names import lightning_module
from fl_lightning.lightning.rank_processes import HeldSignals, announce, connect, end_at_exit, end_with_starter

_T = TypeVar("_T")
_TENSORS = 4096  # most tensors of one exchange between two ranks


class Ranks:
    """This process's place among the processes of a fit, and what it exchanges with the others.

    Lightning's ``DDPStrategy`` lends its launcher and the numbering of ranks, so processes are started as for DDP: by
    the script itself, by torchrun, or by a cluster's scheduler. Nothing else of DDP takes part. ``devices`` has one per
    process of this machine. A rank waits at most ``timeout`` for another, which may train its last clients.
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
        announce(environment)
        self.rank, self.local_rank, self.node_rank = lender.global_rank, lender.local_rank, lender.node_rank
        self.size, self.num_nodes = num_nodes * len(devices), num_nodes
        self.device = devices[self.local_rank]
        self.signals: HeldSignals | None = None  # requests to stop that this process gets during a fit
        self._store: Any = None
        self._divisions = self._exchanges = 0
        self.abandoned = False  # the fit, with an error of its own

    def join(self) -> None:
        """Connects this process with the others, as many as the trainer asks for."""
        end_with_starter(self._environment)
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
        self.abandoned = False

    def _shared_store(self) -> Any:
        """Counters that all ranks see; the first rank keeps them."""
        host, wait = self._environment.main_address, self._timeout
        if self.rank == 0:
            store = TCPStore(host, 0, is_master=True, timeout=wait, wait_for_workers=False)
            self.broadcast(store.port)
            return store
        port = self.broadcast(0)
        with self._answered():
            return TCPStore(host, port, is_master=False, timeout=wait)

    # ---- exchange

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self._store is not None and not self.abandoned:
            self.gather(None)

    def broadcast(self, value: _T, source: int = 0) -> _T:
        """The value of one rank, on all."""
        if self.abandoned:
            return value
        box = [value]
        with self._synchronized():
            dist.broadcast_object_list(box, source, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: _T) -> list[_T]:
        """Every rank's value, in the order of ranks, on all ranks; what is on GPUs comes to this process's."""
        packed = pack(value)
        found: list[Any] = [None] * self.size
        with self._synchronized():
            dist.all_gather_object(found, packed)
        return [unpack(part, self.device) for part in found]

    def gather_parts(self, part: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """A tensor of every rank, in their order, on all ranks; only their first dimensions, ``sizes``, may differ."""
        if self.abandoned:
            raise RankError(f"rank {self.rank} has left the fit with an error of its own: it does not hold all columns")
        longest, rest = max(sizes), part.shape[1:]
        padded = part.contiguous()
        if len(part) < longest:
            padded = torch.cat([part, part.new_zeros(longest - len(part), *rest)])
        found = [part.new_empty(longest, *rest) for _ in sizes]
        with self._synchronized():
            dist.all_gather(found, padded)
        return [theirs[:size] for theirs, size in zip(found, sizes, strict=True)]

    def transfer(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], number: int = 0
    ) -> Pending:
        """Begins to exchange tensors with single ranks; both sides name them in the same order.

        ``sends`` are contiguous, with who gets them, and must not change until the exchange is over. ``receives`` are
        contiguous and overwritten, with who sends them. Exchanges under way at the same time differ in ``number``.
        """
        tags: dict[tuple[bool, int], int] = {}
        operations = []
        for is_send, pairs in ((True, sends), (False, receives)):
            for tensor, rank in pairs:
                tags[is_send, rank] = tag = tags.get((is_send, rank), number * _TENSORS - 1) + 1
                operation = dist.isend if is_send else dist.irecv
                operations.append(dist.P2POp(operation, tensor, rank, tag=tag))
        with self._answered():
            return Pending(self, dist.batch_isend_irecv(operations) if operations else [])

    # ---- notes that all ranks can read

    def post(self, key: str, words: Sequence[Any]) -> None:
        """Leaves numbers and names under a key that nobody else uses."""
        with self._answered():
            self._store.set(key, json.dumps(list(words)))

    def posted(self, keys: Sequence[str]) -> list[Any] | None:
        """What was left under these keys; ``None`` if something is not there yet."""
        with self._answered():
            return [json.loads(found) for found in self._store.multi_get(keys)] if self._store.check(keys) else None

    def forget(self, key: str) -> None:
        """Nobody will read this key again."""
        with self._answered():
            self._store.delete_key(key)

    @contextmanager
    def _synchronized(self) -> Iterator[None]:
        """Around what all ranks do together; leaves a note that this rank has come."""
        self._exchanges += 1
        with self._answered():
            if self._store is not None:
                self._store.set(f"rank {self.rank}", str(self._exchanges))
            yield

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Around everything that waits for others."""
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

        It waits for nobody any more, so that callbacks can still save a checkpoint. Those it has started end when it
        does.
        """
        if not self.abandoned:
            end_at_exit(getattr(self.launcher, "procs", []))
        self.abandoned = True

    def part(self) -> None:
        """A trainer function is over: each process goes on alone, and the first may end before the others."""
        outlive_parent()
        with suppress(RankError):  # who has ended already has nothing to outlive
            self.barrier()

    def follow_requests(self, between_clients: bool = False, ends_round: bool = False) -> None:
        """All ranks do what callbacks or signals have asked of any of them, such as to terminate between clients."""
        signals = self.signals
        assert signals is not None
        signals.follow(self.gather(signals.requests), between_clients, ends_round)

    def until_asked(self, places: Iterable[int]) -> Iterator[int]:
        """These places, as long as this process is not asked to end."""
        for place in places:
            if self.signals is not None and self.signals.urgent:
                return
            yield place

    def claims(self, places: Sequence[int]) -> Iterator[int]:
        """Hands out places, listed alike on all ranks, in order to whichever rank asks next; each goes to one rank."""
        self._divisions += 1  # counted here, not per fit: the store outlives a fit
        while True:
            leaving = self.signals is not None and self.signals.urgent
            with self._answered():  # who leaves takes all that is left, so that nobody begins another
                turn = self._store.add(f"division {self._divisions}", len(places) if leaving else 1) - 1
            if leaving or turn >= len(places):
                return
            yield places[turn]


class Pending:
    """An exchange that was begun, by what ``torch.distributed`` returned for it."""

    def __init__(self, ranks: Ranks, works: Sequence[Any]) -> None:
        self._ranks, self._works = ranks, works

    def is_over(self) -> bool:
        """Whether it is over; does not wait."""
        with self._ranks._answered():
            return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Returns once it is over."""
        with self._ranks._answered():
            for work in self._works:
                work.wait()
