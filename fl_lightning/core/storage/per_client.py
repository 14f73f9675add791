# SPDX-License-Identifier: Apache-2.0
"""Dictionaries by client id that last from round to round."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from fl_lightning.core.model_snapshot import Snapshot

T = TypeVar("T")


class ByClient(Mapping[int, T]):
    """What a method keeps by client id, wherever it lies."""

    @abstractmethod
    def keep(self, client_id: int, value: T, when: int) -> None:
        """Replaces what the client has by ``value``, of round ``when``."""

    @abstractmethod
    def tentatively(self) -> Callable[[bool], None]:
        """A round begins; what is returned is called with whether it counts, and takes changes back if not."""

    @abstractmethod
    def state_dict(self) -> dict[Any, Any]:
        """What a checkpoint holds; tensors share memory with this object."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        """Restores :meth:`state_dict`."""


class PerClient(ByClient[T], MutableMapping[int, T], Generic[T]):
    """A dictionary by client id, in memory.

    Tensors stay the ones that were put in, unless they go to another ``device``: put in copies of what is not your own,
    and replace them, rather than write into them. Beyond ``capacity`` clients, those written longest ago leave first.
    """

    def __init__(self, kind: type[T], device: torch.device | str | None = None, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1 client, found {capacity}")
        self._kind, self._device, self._capacity = kind, device, capacity
        self._held: dict[int, T] = {}  # with a capacity in the order of the last writes

    def __getitem__(self, client_id: int) -> T:
        return self._held[client_id]

    def __setitem__(self, client_id: int, value: T) -> None:
        if self._capacity is not None:
            self._held.pop(client_id, None)
            if len(self._held) >= self._capacity:
                del self._held[next(iter(self._held))]
        if self._device is not None and isinstance(value, Tensor | Snapshot):
            value = cast(T, value.to(self._device))
        self._held[client_id] = value

    def __delitem__(self, client_id: int) -> None:
        del self._held[client_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, client_id: int, value: T, when: int) -> None:
        """Replaces what the client has; the round makes no difference here."""
        self[client_id] = value

    def vector(self, clients: Sequence[int], start: Tensor | float) -> Tensor:
        """``[m]`` float64 on the CPU: the clients' numbers, or those of ``start`` (one each, or for all) without."""
        starts = torch.as_tensor(start, dtype=torch.float64).expand(len(clients)).tolist()
        pairs = zip(clients, starts, strict=True)
        return torch.tensor([self._held.get(client, first) for client, first in pairs], dtype=torch.float64)

    def put(self, clients: Sequence[int], numbers: Tensor) -> None:
        """Replaces the numbers of some clients by ``[m]`` others."""
        self.update(zip(clients, numbers.tolist(), strict=True))

    def tentatively(self) -> Callable[[bool], None]:
        """See :meth:`ByClient.tentatively`."""
        before = dict(self._held)

        def settle(happened: bool) -> None:
            if not happened:
                self._held = before

        return settle

    def state_dict(self) -> dict[int, Any]:
        """Values by client id; models as dictionaries of their tensors."""
        return {client: plain(value) for client, value in self._held.items()}

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Restores :meth:`state_dict`; tensors are copied."""
        self._held = {}
        for client, value in state.items():
            self[int(client)] = restored(self._kind, value)


def plain(value: Any) -> Any:
    """A value as files and messages hold it."""
    return {"params": value.params, "buffers": value.buffers} if isinstance(value, Snapshot) else value


def restored(kind: type[T], value: Any) -> T:
    """A value of some kind from what :func:`plain` made of one; tensors are copied."""
    if kind is Snapshot:
        return cast(T, Snapshot(restored(Tensor, value["params"]), restored(Tensor, value["buffers"])))
    if kind is Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(f"a tensor is needed, found {type(value).__name__}")
        return cast(T, value.detach().clone())
    if isinstance(value, Tensor | Mapping | str):
        raise TypeError(f"{kind.__name__} is needed, found {type(value).__name__}")
    return kind(value)  # type: ignore[call-arg]
