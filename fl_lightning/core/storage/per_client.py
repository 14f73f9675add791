# SPDX-License-Identifier: Apache-2.0
"""State by client id: dictionaries in memory, and models in files."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from fl_lightning.core.model_snapshot import Snapshot
from fl_lightning.core.storage.files import client_file, read_whole, write_whole

T = TypeVar("T")


class ByClient(Mapping[int, T]):
    """State by client id, wherever it lies."""

    @abstractmethod
    def keep(self, client_id: int, value: T, when: int) -> None:
        """Replaces what the client has by ``value``, of round ``when``."""

    @abstractmethod
    def transaction(self) -> Callable[[bool], None]:
        """A round begins; what is returned is called with whether it counts, and takes changes back if not."""

    def set_num_clients(self, clients: int) -> None:
        """So many clients are registered; what others had, who may come back, is not shown."""

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
        self._gone: dict[int, T] = {}  # of clients that are not registered any more

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

    def transaction(self) -> Callable[[bool], None]:
        """See :meth:`ByClient.transaction`."""
        before = dict(self._held)

        def commit_or_undo(happened: bool) -> None:
            if not happened:
                self._held = before

        return commit_or_undo

    def set_num_clients(self, clients: int) -> None:
        """See :meth:`ByClient.set_num_clients`."""
        everybody = self._gone | self._held
        self._held = {client: value for client, value in everybody.items() if client < clients}
        self._gone = {client: value for client, value in everybody.items() if client >= clients}

    def state_dict(self) -> dict[int, Any]:
        """Values by client id; models as dictionaries of their tensors."""
        return {client: plain(value) for client, value in (self._gone | self._held).items()}

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Restores :meth:`state_dict`; tensors are copied."""
        self._held, self._gone = {}, {}
        for client, value in state.items():
            self[int(client)] = restored(self._kind, value)


def renumbered(state: Mapping[Any, Any], ids: Mapping[int, int]) -> dict[Any, Any]:
    """A state by client id, or with ``"clients"`` or ``"files"`` whose first column is it, for other ids of clients."""
    tables = {name: with_ids(state[name], ids) for name in ("clients", "files") if name in state}
    return {ids.get(key, key): value for key, value in state.items()} | tables


def with_ids(table: Tensor, ids: Mapping[int, int]) -> Tensor:
    """A copy of a table ``[k, ...]``, or of a vector, whose first column holds client ids, for other ids of clients."""
    changed = table.clone()
    column = changed if changed.dim() == 1 else changed[:, 0]
    column.copy_(torch.tensor([ids.get(client, client) for client in column.tolist()], dtype=table.dtype))
    return changed


def renumbering(states: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[int, int], list[str]]:
    """What :func:`matched` says of a checkpoint; where clients have no names, there or now, they keep their numbers."""
    before = [*states["fit"].get("names", ()), *states.get("gone", ())]
    return matched(before, names) if before and isinstance(names, tuple) else ({}, [])


def matched(before: Sequence[str], names: Sequence[str]) -> tuple[dict[int, int], list[str]]:
    """Ids that clients have now, by those that they had, and who is gone: their ids follow the others'."""
    places = {name: place for place, name in enumerate(names)}
    gone = [name for name in before if name not in places]
    places |= {name: len(names) + place for place, name in enumerate(gone)}
    return {place: places[name] for place, name in enumerate(before)}, gone


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


_CHECKPOINTS = 2
"""So many of the newest can be resumed from."""


class ClientFiles(ByClient[Snapshot]):
    """One :class:`~fl_lightning.core.model_snapshot.Snapshot` per client: ``<directory>/client-<id>/round-<when>.pt``.

    The id in the name is the client's first one: it stays where others join or leave. A checkpoint holds ids, rounds
    and digests only; the files are what it refers to. A file is never changed, and stays as long as it is a client's
    newest or one of the last two different states refers to it. Every fit needs a directory of its own.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.clear()

    def __len__(self) -> int:
        return len(self._newest)

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._newest

    def __iter__(self) -> Iterator[int]:
        return iter(self._newest)

    def __getitem__(self, client_id: int) -> Snapshot:
        when, digest = self._newest[client_id]
        path = self._path(client_id, when)
        load = partial(torch.load, path, map_location="cpu", weights_only=True)
        content = read_whole(path, load, f"bring back the file, or resume from a checkpoint of before round {when}")
        model = Snapshot(content["params"], content["buffers"])
        if _digest(model) != digest:
            raise ValueError(
                f"{path} is not the model of client {client_id} that the checkpoint refers to: another fit has "
                "written to this directory; give every fit one of its own"
            )
        return model

    def keep(self, client_id: int, value: Snapshot, when: int) -> None:
        """Writes the client's model of round ``when``, flushed to disk before it gets its name."""
        if client_id not in self._newest and client_id in self._places.values():
            self._places[client_id] = max(*self._places.values(), *self._newest) + 1
        model = value.to("cpu")
        content = {"client": client_id, "round": when, "params": model.params, "buffers": model.buffers}
        write_whole(self._path(client_id, when), content, private=True)
        before = self._newest.get(client_id)
        self._newest[client_id] = when, _digest(model)
        if before is not None:
            self._remove({(client_id, before[0])})

    def transaction(self) -> Callable[[bool], None]:
        """Nothing: reports bring models once their round has happened."""
        return lambda happened: None

    def clear(self) -> None:
        """Forgets everything; files stay where they are."""
        self._newest: dict[int, tuple[int, int]] = {}
        self._places: dict[int, int] = {}  # by client, the id in the names of its files, if it is another one
        self._referred: list[dict[int, int]] = []  # client to round, per state handed out

    def state_dict(self) -> dict[str, Any]:
        """Which files are the newest, ``[k, 4]``: client, round, digest, first id. Removal waits for later states."""
        state = {client: when for client, (when, _) in self._newest.items()}
        if state and (not self._referred or self._referred[-1] != state):
            self._referred.append(state)
            dropped, self._referred = self._referred[:-_CHECKPOINTS], self._referred[-_CHECKPOINTS:]
            self._remove({entry for old in dropped for entry in old.items()})
        entries = [[c, *of_round, self._places.get(c, c)] for c, of_round in sorted(self._newest.items())]
        return {"files": torch.tensor(entries, dtype=torch.int64).view(-1, 4)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`; files must be there, and are read when they are asked for."""
        self.clear()
        for client, when, digest, *place in state["files"].tolist():
            self._newest[client], self._places[client] = (when, digest), place[0] if place else client
        for client, (when, _) in self._newest.items():
            if not self._path(client, when).exists():
                raise FileNotFoundError(
                    f"{self._path(client, when)} is gone, the model of client {client} after round {when} that the "
                    "checkpoint refers to: resume from one of the two newest checkpoints"
                )
        self._referred = [{client: when for client, (when, _) in self._newest.items()}] if self._newest else []

    def _path(self, client_id: int, when: int) -> Path:
        return client_file(self.directory, self._places.get(client_id, client_id), when)

    def _remove(self, entries: AbstractSet[tuple[int, int]]) -> None:
        """Deletes files that nothing refers to any more."""
        referred = {entry for state in self._referred for entry in state.items()}
        referred |= {(client, when) for client, (when, _) in self._newest.items()}
        for client, when in entries - referred:
            self._path(client, when).unlink(missing_ok=True)


def _digest(model: Snapshot) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in (model.params, model.buffers):
        digest.update(part.detach().contiguous().view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little", signed=True)
