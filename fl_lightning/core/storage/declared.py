# SPDX-License-Identifier: Apache-2.0
"""The state of a method from round to round, declared once on its class, as a module says which buffers it has.

A class body says::

    class ControlVariates(ClientRule):
        c = server_state(Tensor, sent="all")
        c_i = per_client(Tensor, sent="owner", device="control_device")

``self.c`` is then a tensor, ``None`` until it is set, and ``self.c_i`` a dictionary by client id. Both are as long as
the model's parameters; a tensor of another shape begins as one, as in ``server_state(torch.zeros(0))``. A declaration
is a descriptor: the value lies in ``vars(self)`` and begins anew where nobody has set it. The rest follows from it in
:mod:`fl_lightning.core.storage.rule_state`: what checkpoints hold and clients get, what several processes share, how
many bytes a fit takes, and how a round is taken back: rounds replace state and never write into it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast, overload

import torch
from torch import Tensor

from fl_lightning.arguments import ANY, checked, shown
from fl_lightning.core.model_snapshot import Snapshot
from fl_lightning.core.storage.per_client import ByClient, ClientFiles, PerClient, plain, renumbered, restored, with_ids
from fl_lightning.core.storage.row_history import RowHistory

T = TypeVar("T")
Held = TypeVar("Held", bound=ByClient[Any] | RowHistory)
_KINDS = (int, float, bool, Tensor)


class Extent(NamedTuple):
    """How large a state can get."""

    clients: int  # registered ones
    cohort: int  # clients per round
    columns: int  # those of this process
    layers: int
    model: int  # bytes of a whole model, buffers included
    dtype: torch.dtype  # of parameters and rows


class Declared(ABC, Generic[T]):
    """One attribute of a method that is part of its state."""

    name: str = ""  # of the attribute
    kind: type = object  # of the value, or of one client's
    in_columns: bool = False  # it has a number per column
    sent: Literal["all", "owner"] | None = None  # by the server, to whom
    at_client: bool = False  # it lies at clients
    files: str | None = None  # the attribute of the rule that says in which directory it lies
    placement: tuple[str, ...] = ()  # attributes of the rule that say where it lies, and change no result

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @abstractmethod
    def initial(self, rule: object) -> T:
        """The value before the first round."""

    @abstractmethod
    def state(self, value: T) -> Any:
        """The value as a checkpoint holds it, sharing memory; ``None``: not at all."""

    @abstractmethod
    def loaded(self, rule: object, state: Any) -> T:
        """The value that had this state."""

    def renumbered(self, state: Any, ids: Mapping[int, int]) -> Any:
        """The state where clients have other ids now, by those that they had."""
        return state

    def by_column(self, state: Any, change: Callable[[Any], Any]) -> Any:
        """The state with what ``change`` makes of the tensors that have a number per column."""
        return change(state) if self.in_columns else state

    @abstractmethod
    def transaction(self, rule: object) -> Callable[[bool], None]:
        """A round begins; what is returned is called when it is known whether it counts."""

    def max_nbytes(self, rule: object, extent: Extent) -> int:
        """Bytes that it will hold at most; 0 if they do not matter."""
        return 0

    @overload
    def __get__(self, rule: None, kind: type) -> Declared[T]: ...
    @overload
    def __get__(self, rule: object, kind: type) -> T: ...
    def __get__(self, rule: object | None, kind: type) -> T | Declared[T]:
        if rule is None:
            return self
        held = vars(rule)
        if self.name not in held:
            held[self.name] = self.initial(rule)
        return cast(T, held[self.name])


def named(rule: object, attribute: str | None) -> Any:
    """The rule's attribute of this name; ``None`` without one."""
    return None if attribute is None else getattr(rule, attribute)


class _ServerState(Declared[T]):
    def __init__(self, start: T | type, sent: Literal["all"] | None, wide: bool, ids: bool) -> None:
        self.kind = start if isinstance(start, type) else type(start)
        self._start = None if isinstance(start, type) else start
        self.in_columns, self.sent, self._wide, self._ids = start is Tensor, sent, wide, ids

    def initial(self, rule: object) -> T:
        return cast(T, self._start)

    def state(self, value: T) -> Any:
        return plain(value)

    def loaded(self, rule: object, state: Any) -> T:
        return cast(T, restored(self.kind, state))

    def renumbered(self, state: Any, ids: Mapping[int, int]) -> Any:
        return with_ids(state, ids) if self._ids else state

    def transaction(self, rule: object) -> Callable[[bool], None]:
        before = self.__get__(rule, type(rule))
        return lambda happened: None if happened else setattr(rule, self.name, before)

    def max_nbytes(self, rule: object, extent: Extent) -> int:
        dtype = torch.promote_types(extent.dtype, torch.float32) if self._wide else extent.dtype
        return extent.columns * dtype.itemsize if self.in_columns else 0


class _Object(Declared[Held]):
    """An object whose content changes; nothing takes its place."""

    def __set__(self, rule: object, value: Held) -> None:
        raise AttributeError(f"{self.name} cannot be replaced: change what it holds, found {value!r}")

    def state(self, value: Held) -> Any:
        return value.state_dict()

    def loaded(self, rule: object, state: Any) -> Held:
        value = self.initial(rule)
        value.load_state_dict(state)
        return value

    def renumbered(self, state: Any, ids: Mapping[int, int]) -> Any:
        return renumbered(state, ids)

    def transaction(self, rule: object) -> Callable[[bool], None]:
        return self.__get__(rule, type(rule)).transaction()


class _PerClient(_Object[PerClient[T]]):
    def __init__(
        self, kind: type[T], sent: Literal["owner"] | None, device: str | None, dtype: torch.dtype | None
    ) -> None:
        self.kind, self._device, self._dtype = kind, device, dtype
        self.in_columns, self.sent = kind is Tensor, sent
        self.placement = () if device is None else (device,)

    def initial(self, rule: object) -> PerClient[T]:
        return PerClient(self.kind, named(rule, self._device))

    def by_column(self, state: Any, change: Callable[[Any], Any]) -> Any:
        return {client: change(value) for client, value in state.items()} if self.in_columns else state

    def max_nbytes(self, rule: object, extent: Extent) -> int:
        return extent.clients * extent.columns * (self._dtype or extent.dtype).itemsize if self.in_columns else 0


class _AtClients(_Object[ByClient[Snapshot]]):
    at_client, kind = True, Snapshot

    def __init__(self, device: str | None, capacity: str | None, files: str | None, size: str | None) -> None:
        self._device, self._capacity, self.files, self._size = device, capacity, files, size
        self.placement = tuple(name for name in (device, files) if name is not None)

    def initial(self, rule: object) -> ByClient[Snapshot]:
        if (directory := named(rule, self.files)) is not None:
            return ClientFiles(directory)
        return PerClient(Snapshot, named(rule, self._device), named(rule, self._capacity))

    def loaded(self, rule: object, state: Any) -> ByClient[Snapshot]:
        here = named(rule, self.files) is not None
        if ("files" in state) != here:
            there = f"itself: leave {self.files} out" if here else "in files: give the method the same directory"
            raise ValueError(f"the checkpoint has the personal models {there}")
        return super().loaded(rule, state)

    def max_nbytes(self, rule: object, extent: Extent) -> int:
        in_files = named(rule, self.files) is not None
        held = 0 if in_files else min(extent.clients, named(rule, self._capacity) or extent.clients)
        return (held + extent.cohort) * (named(rule, self._size) or extent.model)


class _Rows(_Object[RowHistory]):
    in_columns, kind = True, RowHistory

    def __init__(self, capacity: str, reserve: str, device: str) -> None:
        self._capacity, self._reserve, self._device, self.placement = capacity, reserve, device, (device,)

    def initial(self, rule: object) -> RowHistory:
        return RowHistory(named(rule, self._capacity), named(rule, self._device))

    def by_column(self, state: Any, change: Callable[[Any], Any]) -> Any:
        return {**state, "rows": change(state["rows"])}

    def max_nbytes(self, rule: object, extent: Extent) -> int:
        rows = named(rule, self._reserve)
        return RowHistory.max_nbytes(rows, extent.columns, extent.layers, extent.dtype) if rows else 0


@overload
def server_state(
    start: type[T], *, sent: Literal["all"] | None = None, wide: bool = False, ids: bool = False
) -> Declared[T | None]: ...
@overload
def server_state(
    start: T, *, sent: Literal["all"] | None = None, wide: bool = False, ids: bool = False
) -> Declared[T]: ...
@checked(start=ANY)
def server_state(
    start: Any, *, sent: Literal["all"] | None = None, wide: bool = False, ids: bool = False
) -> Declared[Any]:
    """Declares one value at the server: a number, a tuple of numbers, or a tensor.

    Args:
        start: the value before the first round, or its type, and the value is then ``None``. Of type ``Tensor`` it has
            a number per parameter in its last dimension; a tensor of another shape must begin with one.
        sent: ``"all"``: it goes to every client of a round.
        wide: it has float32 or better, for the memory plan.
        ids: it is a vector of client ids.
    """
    numbers = start if isinstance(start, tuple) else (start,)
    if start not in (*_KINDS, tuple) if isinstance(start, type) else not all(map(_can_begin, numbers)):
        raise TypeError(
            f"start of server_state must be a number, a tensor, a tuple of these, or such a type, found {shown(start)}"
        )
    return _ServerState(start, sent, wide, ids)


def _can_begin(value: object) -> bool:
    plain_one = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
    return plain_one or (isinstance(value, float) and value == value) or (isinstance(value, int) and abs(value) < 2**63)


@checked(kind=ANY)
def per_client(
    kind: type[T],
    *,
    sent: Literal["owner"] | None = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> Declared[PerClient[T]]:
    """Declares what the server has by client id: a :class:`PerClient`.

    Args:
        kind: type of one client's value: ``int``, ``float``, ``bool`` or :class:`Tensor`, with a number per parameter
            in its last dimension.
        sent: ``"owner"``: a client's goes to that client alone.
        device: the rule's attribute that says where tensors live.
        dtype: of tensors, for the memory plan; ``None``: that of the parameters.
    """
    if kind not in _KINDS:
        raise TypeError(f"kind of per_client must be int, float, bool or Tensor, found {shown(kind)}")
    return _PerClient(kind, sent, device, dtype)


@checked()
def at_clients(
    *, device: str | None = None, capacity: str | None = None, files: str | None = None, size: str | None = None
) -> Declared[ByClient[Snapshot]]:
    """Declares a model, or a part of one, that stays at its client: a :class:`Snapshot` by client id.

    A client's report brings it, as ``ClientReport(local_state={name: plain(snapshot)})``, and it takes the place of
    what the client had if the report enters the step. The server of a real federation never sees it.

    Args:
        device: the rule's attribute that says where models live.
        capacity: that says of how many clients there are models.
        files: that says in which directory they lie.
        size: that says how many bytes one takes, for the memory plan; ``None``: as many as the module's.
    """
    return _AtClients(device, capacity, files, size)


@checked()
def row_history(*, capacity: str, reserve: str, device: str) -> Declared[RowHistory]:
    """Declares a :class:`RowHistory`, by the rule's attributes for most rows, rows that a fit needs, and device."""
    return _Rows(capacity, reserve, device)
