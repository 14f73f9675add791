# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 - Declared documents what declarations override
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

Files of their own have what is kept by client id (:mod:`~fl_lightning.core.storage.per_client`), what lies at clients
(:mod:`~fl_lightning.core.storage.at_clients`), and rows (:mod:`~fl_lightning.core.storage.row_history`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast, overload

import torch
from torch import Tensor

from fl_lightning.arguments import ANY, checked, shown
from fl_lightning.core.model_snapshot import Snapshot

T = TypeVar("T")
S = TypeVar("S")
KINDS = (int, float, bool, Tensor)


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


class Container(Declared[T]):
    """An attribute that holds one object as long as the rule lives, whose content changes.

    The object has ``state_dict``, ``load_state_dict`` and ``transaction``, as a declaration has.
    """

    def __set__(self, rule: object, value: T) -> None:
        raise AttributeError(f"{self.name} cannot be replaced: change what it holds, found {value!r}")

    def state(self, value: Any) -> Any:
        return value.state_dict()

    def loaded(self, rule: object, state: Any) -> T:
        value: Any = self.initial(rule)
        value.load_state_dict(state)
        return cast(T, value)

    def renumbered(self, state: Any, ids: Mapping[int, int]) -> Any:
        return renumbered(state, ids)

    def transaction(self, rule: object) -> Callable[[bool], None]:
        held: Any = self.__get__(rule, type(rule))
        return cast("Callable[[bool], None]", held.transaction())


class server_state(Declared[T]):  # noqa: N801 - as property
    """Declares one value at the server: a number, a tuple of numbers, or a tensor.

    Args:
        start: the value before the first round, or its type, and the value is then ``None``. Of type ``Tensor`` it has
            a number per parameter in its last dimension; a tensor of another shape must begin with one.
        sent: ``"all"``: it goes to every client of a round.
        wide: it has float32 or better, for the memory plan.
        ids: it is a vector of client ids.
    """

    @overload
    def __init__(
        self: server_state[S | None], start: type[S], *, sent: Literal["all"] | None = None, wide: bool = False,
        ids: bool = False,
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: server_state[S], start: S, *, sent: Literal["all"] | None = None, wide: bool = False, ids: bool = False
    ) -> None: ...
    @checked(start=ANY)
    def __init__(
        self, start: Any, *, sent: Literal["all"] | None = None, wide: bool = False, ids: bool = False
    ) -> None:
        numbers = start if isinstance(start, tuple) else (start,)
        if start not in (*KINDS, tuple) if isinstance(start, type) else not all(map(_can_begin, numbers)):
            raise TypeError(
                "start of server_state must be a number, a tensor, a tuple of these, or such a type, found "
                f"{shown(start)}"
            )
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


def _can_begin(value: object) -> bool:
    plain_one = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
    return plain_one or (isinstance(value, float) and value == value) or (isinstance(value, int) and abs(value) < 2**63)


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
