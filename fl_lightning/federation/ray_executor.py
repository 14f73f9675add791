# SPDX-License-Identifier: Apache-2.0
"""Clients on the machines of a Ray cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fl_lightning.arguments import Bounds, checked
from fl_lightning.federation.executor import Executor, Work, Workers


@checked(num_cpus=Bounds(0), num_gpus=Bounds(0), workers=Bounds(1))
@dataclass(frozen=True)
class Ray(Executor):
    """Trains several clients at a time in actors of Ray, on one machine or on many (``fl-lightning[ray]``).

    Uses the cluster that ``ray.init(...)`` has connected to, or else what ``ray.init()`` finds or starts. Classes of
    scripts and notebooks need no module of their own. What the workers import must be installed on their machines.

    Args:
        num_cpus: processor cores of an actor, which computes with as many threads.
        num_gpus: GPUs of an actor, for a fit on a GPU; 0.25 lets four share one.
        workers: actors; ``None``: as many as the cluster has room for.

    Raises:
        ValueError: an argument is out of range, or the cluster has no room for one actor.
    """

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    workers: int | None = None

    def pickler(self) -> ModuleType:
        """Ray's, which takes classes of ``__main__`` and functions along."""
        import ray

        return ray.cloudpickle  # type: ignore[no-any-return]

    def start(self, work: Work) -> Workers:
        """See :meth:`Executor.start`."""
        import ray

        if not ray.is_initialized():
            ray.init()
        needs, has = {"CPU": self.num_cpus, "GPU": self.num_gpus}, ray.cluster_resources()
        room = min((int(has.get(kind, 0) // number) for kind, number in needs.items() if number), default=1)
        if room == 0:
            raise ValueError(f"num_cpus and num_gpus of Ray must be what the cluster has for one actor, found {has}")
        kind, content = ray.remote(num_cpus=self.num_cpus, num_gpus=self.num_gpus)(Actor), ray.put(work)
        return Actors(lambda: kind.remote(content), self.workers or room)


class Actor:
    """Does the work of a fit where Ray has put it."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def answer(self, shared: bytes, request: bytes) -> bytes:
        """One client's training."""
        return self._work(shared, request)


class Actors(Workers):
    """The actors of a fit."""

    def __init__(self, make: Callable[[], Any], number: int) -> None:
        self._make, self._actors = make, [make() for _ in range(number)]

    def run(self, shared: bytes, requests: Sequence[bytes]) -> Iterator[tuple[int, bytes | Exception]]:
        """See :meth:`Workers.run`; whoever is free takes the next request."""
        import ray

        content, waiting, idle = ray.put(shared), deque(enumerate(requests)), list(range(len(self._actors)))
        busy: dict[Any, tuple[int, int]] = {}
        while waiting or busy:
            while waiting and idle:
                (place, request), number = waiting.popleft(), idle.pop()
                busy[self._actors[number].answer.remote(content, request)] = place, number
            done = ray.wait(list(busy))[0][0]
            place, number = busy.pop(done)
            idle.append(number)
            try:
                answer = ray.get(done)
            except ray.exceptions.RayError as error:
                answer, self._actors[number] = error, self._make()
            yield place, answer

    def stop(self) -> None:
        """See :meth:`Workers.stop`."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
