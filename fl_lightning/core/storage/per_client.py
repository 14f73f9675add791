# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 - Declared documents what declarations override
"""What a server keeps by client id: dictionaries in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from fl_lightning.arguments import ANY, checked, shown
from fl_lightning.core.model_snapshot import Snapshot
from fl_lightning.core.storage.declared import KINDS, Container, Extent, named, plain, restored

T = TypeVar("T")


class per_client(Container["PerClient[T]"]):  # noqa: N801 - as property
    """Declares what the server has by client id: a :class:`PerClient`.

    Args:
        kind: type of one client's value: ``int``, ``float``, ``bool`` or :class:`Tensor`, with a number per parameter
            in its last dimension.
        sent: ``"owner"``: a client's goes to that client alone.
        device: the rule's attribute that says where tensors live.
        dtype: of tensors, for the memory plan; ``None``: that of the parameters.
    """

    @checked(kind=ANY)
    def __init__(
        self,
        kind: type[T],
        *,
        sent: Literal["owner"] | None = None,
        device: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if kind not in KINDS:
            raise TypeError(f"kind of per_client must be int, float, bool or Tensor, found {shown(kind)}")
        self.kind, self._device, self._dtype = kind, device, dtype
        self.in_columns, self.sent = kind is Tensor, sent
        self.placement = () if device is None else (device,)

    def initial(self, rule: object) -> PerClient[T]:
        return PerClient(self.kind, named(rule, self._device))

    def by_column(self, state: Any, change: Callable[[Any], Any]) -> Any:
        return {client: change(value) for client, value in state.items()} if self.in_columns else state

    def max_nbytes(self, rule: object, extent: Extent) -> int:
        return extent.clients * extent.columns * (self._dtype or extent.dtype).itemsize if self.in_columns else 0


class PerClient(MutableMapping[int, T]):
    """A dictionary by client id, in memory.

    Tensors stay the ones that were put in, unless they go to another ``device``: put in copies of what is not your own,
    and replace them, rather than write into them.
    """

    def __init__(self, kind: type[T], device: torch.device | str | None = None) -> None:
        self._kind, self._device = kind, device
        self._held: dict[int, T] = {}
        self._gone: dict[int, T] = {}  # of clients that are not registered any more

    def __getitem__(self, client_id: int) -> T:
        return self._held[client_id]

    def __setitem__(self, client_id: int, value: T) -> None:
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

    def transaction(self) -> Callable[[bool], None]:
        """A round begins; what is returned is called with whether it counts, and takes changes back if not."""
        before = dict(self._held)

        def commit_or_undo(happened: bool) -> None:
            if not happened:
                self._held = before

        return commit_or_undo

    def set_num_clients(self, clients: int) -> None:
        """So many clients are registered; what others had, who may come back, is not shown."""
        everybody = self._gone | self._held
        self._held = {client: value for client, value in everybody.items() if client < clients}
        self._gone = {client: value for client, value in everybody.items() if client >= clients}

    def state_dict(self) -> dict[int, Any]:
        """What a checkpoint holds, by client id: models as dictionaries; tensors share memory with this object."""
        return {client: plain(value) for client, value in (self._gone | self._held).items()}

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Restores :meth:`state_dict`; tensors are copied."""
        self._held, self._gone = {}, {}
        for client, value in state.items():
            self[int(client)] = restored(self._kind, value)
