# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 - Declared documents what declarations override
"""What rules remember of clients between rounds: their last update, with its inner products."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning import ops
from fl_lightning.arguments import checked
from fl_lightning.core.storage.declared import Container, Extent, named
from fl_lightning.core.tensors import empty_rows, first_rows
from fl_lightning.core.updates import UpdateMatrix
from fl_lightning.ops.rows import accumulation_device


def moved(small: Tensor, beside: Tensor) -> Tensor:
    """A small tensor of the CPU where another is; the copy is queued, and nothing waits for it."""
    return small.to(beside.device, non_blocking=True)


class _Entry(NamedTuple):
    slot: int
    round: int
    scale: float


class _Fresh(NamedTuple):
    updates: UpdateMatrix
    rows: Tensor
    slots: Tensor
    products: Tensor


class RowHistory:
    """The last update of each client, and the inner products among the remembered ones.

    Products lie there per layer, of all pairs of rows; what :meth:`joint_gram` has computed is reused when the new rows
    are remembered, so a round computes products of new rows only. The first row makes room for ``reserve`` rows, of
    which a CPU's memory holds what is written; beyond them storage grows by half, and the old one and the new one exist
    at once. It never exceeds ``capacity`` rows: those of the oldest rounds leave first (among equals, larger client
    ids). Products lie beside the rows, which live on ``device``, or beside the updates; nothing looks at them, so a
    device is not waited for.
    """

    reserve = 0

    def __init__(self, capacity: int | None = None, device: torch.device | str | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1 row, found {capacity}")
        self.capacity = capacity
        self.device = None if device is None else torch.device(device)
        self.clear()

    def clear(self) -> None:
        """Forgets every row and frees the memory."""
        self._entries: dict[int, _Entry] = {}
        self._rows = torch.empty(0, 0)  # [C, n], one slot per client
        self._gram = torch.empty(0, 0, 0, dtype=torch.float64)  # [L, C, C] without the scales, beside the rows
        self._fresh: _Fresh | None = None
        self._waiting: list[Callable[[], None]] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, client_id: int) -> bool:
        return client_id in self._entries

    @staticmethod
    def max_nbytes(rows: int, columns: int, layers: int, dtype: torch.dtype) -> int:
        """Bytes that storage for ``rows`` rows of so many columns takes, products per layer included."""
        return rows * columns * dtype.itemsize + layers * rows * rows * 8

    def select(self, exclude: Collection[int] = (), since: float | None = None) -> list[int]:
        """Remembered clients, from round ``since`` on, those of the newest round first, then by id."""
        chosen = [i for i, e in self._entries.items() if i not in exclude and (since is None or e.round >= since)]
        return sorted(chosen, key=lambda i: (-self._entries[i].round, i))

    def rounds(self, clients: Sequence[int]) -> list[int]:
        """The rounds that the remembered rows of ``clients`` come from."""
        return [self._entries[i].round for i in clients]

    def joint_gram(self, updates: UpdateMatrix, clients: Sequence[int], leaving: Collection[int] = ()) -> Tensor:
        """Gram matrices of the ``m`` new rows followed by the remembered rows of ``h`` clients: ``[L, m + h, m + h]``.

        They are float64 where ``updates.gram()`` is; remembered rows carry the scale given to :meth:`remember`, which
        is about to replace the rows of those ``leaving``: of these no products are computed.
        """
        self._fresh = None
        gram = updates.gram()
        if not clients:
            return gram
        self._check(updates)
        slots, scales = self._slots(clients)
        rows = updates.rows.to(self._rows.device)
        staying = self._slots_without(set(leaving).difference(clients))
        products = updates.beside(rows).cross_gram(self._rows[: self._top()], staying)
        self._fresh = _Fresh(updates, rows, staying, products)
        there, scales = moved(torch.searchsorted(staying, slots), products), moved(scales, products)
        cross = (products[:, :, there] * scales).to(gram.device)
        held = moved(slots, self._gram)
        among = (self._gram[:, held[:, None], held] * torch.outer(scales, scales)).to(gram.device)
        return torch.cat([torch.cat([gram, cross], 2), torch.cat([cross.mT, among], 2)], 1)

    def combine(self, updates: UpdateMatrix, coeff: Tensor, clients: Sequence[int]) -> Tensor:
        """Linear combination ``[n]`` of new and remembered rows, rounded once, in the new rows' place and dtype.

        ``coeff`` is ``[L, m + h]`` float64 on the CPU or beside the rows, in the order of :meth:`joint_gram`.
        """
        m, rows = len(updates), updates.rows
        if not clients:
            return updates.combine(coeff)
        updates.columns.note(coeff)
        slots, scales = (moved(each, coeff) for each in self._slots(clients))
        weights = coeff.new_zeros(coeff.shape[0], self._top())
        weights[:, slots] = coeff[:, m:] * scales
        if rows.device == self._rows.device and rows.dtype == self._rows.dtype:
            both = torch.cat([coeff[:, :m], weights], 1)
            return ops.layer_cross_combine(rows, self._rows[: self._top()], updates.offsets, both)
        # New and remembered parts may cancel, so they are summed before the result is rounded to the rows' dtype.
        wide = torch.float32 if rows.device.type == "mps" else torch.float64
        step = updates.combine(coeff[:, :m], out=torch.zeros(rows.shape[1], dtype=wide, device=rows.device))
        step, weights = step.to(self._rows.device), weights.to(self._gram.device)
        ops.layer_combine(self._rows[: self._top()], updates.offsets, weights, step)
        return step.to(rows.device, rows.dtype)

    def remember(
        self, updates: UpdateMatrix, clients: Mapping[int, int], when: int, scales: Tensor | float = 1.0
    ) -> None:
        """Stores new rows of round ``when`` in place of the clients' old ones.

        ``clients`` are ids by row position; at most the first ``capacity`` are stored. ``scales``, ``[m]`` or a number,
        are factors that products and combinations apply to the stored rows.
        """
        if self._waiting is not None:
            self._waiting.append(partial(self.remember, updates, clients, when, scales))
            return
        retained = dict(list(clients.items())[: self.capacity])
        if not retained:
            return
        fresh, self._fresh = self._fresh, None
        if self._rows.numel():
            self._check(updates)
        slots, where = self._assign(list(retained.values()), updates), torch.tensor(list(retained))
        staying, own = self._slots_without(retained.values()), updates.gram()
        if fresh is None or fresh.updates is not updates or not torch.isin(staying, fresh.slots).all():
            rows, products = updates.rows.to(self._rows.device), own[:, :, :0].to(self._gram.device)
            if len(staying):
                products = updates.beside(rows).cross_gram(self._rows, staying)
            fresh = _Fresh(updates, rows, staying, products)
        mine, at, there = moved(where, own), moved(slots, self._gram), moved(staying, self._gram)
        cross = fresh.products[:, moved(where, fresh.products)]
        cross = cross[:, :, moved(torch.searchsorted(fresh.slots, staying), cross)]
        self._gram[:, at[:, None], there], self._gram[:, there[:, None], at] = cross, cross.mT
        self._gram[:, at[:, None], at] = own[:, mine[:, None], mine].to(self._gram.device)
        factors = torch.as_tensor(scales, dtype=torch.float64).expand(len(updates)).tolist()
        for slot, (position, client) in zip(slots.tolist(), retained.items(), strict=True):
            self._rows[slot].copy_(fresh.rows[position])
            self._entries[client] = _Entry(slot, when, factors[position])

    def forget(self, before: int) -> None:
        """Forgets rows of rounds earlier than ``before``; their memory is used again."""
        if self._waiting is not None:
            self._waiting.append(partial(self.forget, before))
            return
        self._entries = {i: e for i, e in self._entries.items() if e.round >= before}

    def transaction(self) -> Callable[[bool], None]:
        """Rows are too large to copy: changes from now on wait until what is returned says whether they count."""
        self._waiting = []

        def commit_or_undo(happened: bool) -> None:
            waiting, self._waiting = self._waiting or [], None
            for change in waiting if happened else []:
                change()

        return commit_or_undo

    def state_dict(self) -> dict[str, Any]:
        """Rows, products and their bookkeeping; the rows share memory with the history."""
        entries, top = sorted(self._entries.items()), self._top()
        return {
            "rows": first_rows(self._rows, top),
            "gram": self._gram[:, :top, :top].contiguous(),
            "clients": torch.tensor([[i, e.slot, e.round] for i, e in entries], dtype=torch.int64).view(-1, 3),
            "scales": torch.tensor([e.scale for _, e in entries], dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, products bit for bit."""
        self.clear()
        if len(state["clients"]):
            self._rows = empty_rows(len(state["rows"]), state["rows"], self.device).copy_(state["rows"])
            self._gram = state["gram"].to(accumulation_device(self._rows), copy=True)
        for (client, slot, when), scale in zip(state["clients"].tolist(), state["scales"].tolist(), strict=True):
            self._entries[client] = _Entry(slot, when, scale)

    def _top(self) -> int:
        return max((e.slot for e in self._entries.values()), default=-1) + 1

    def _slots_without(self, clients: Collection[int]) -> Tensor:
        return torch.tensor(sorted(e.slot for i, e in self._entries.items() if i not in clients), dtype=torch.int64)

    def _slots(self, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
        entries = [self._entries[i] for i in clients]
        return torch.tensor([e.slot for e in entries]), torch.tensor([e.scale for e in entries], dtype=torch.float64)

    def _check(self, updates: UpdateMatrix) -> None:
        rows, held, layers, found = updates.rows, self._rows, len(self._gram), len(updates.gram())
        if rows.shape[1] != held.shape[1] or rows.dtype != held.dtype or found != layers:
            raise ValueError(
                f"updates must match the remembered rows, {layers} layers, {held.shape[1]} columns, "
                f"{held.dtype}; found {found}, {rows.shape[1]}, {rows.dtype}"
            )
        if self.device is None and held.device != rows.device:  # a restored history may come from another device
            self._rows = empty_rows(len(held), held, rows.device).copy_(held)
            self._gram = self._gram.to(accumulation_device(rows))

    def _assign(self, arriving: list[int], updates: UpdateMatrix) -> Tensor:
        """Slots for the clients: the ones they have, else the lowest free ones, after the oldest have left."""
        if self.capacity is not None:
            for client in self.select(exclude=arriving)[self.capacity - len(arriving) :]:
                del self._entries[client]
        taken = {e.slot for e in self._entries.values()}
        new = [i for i in arriving if i not in self._entries]
        if len(taken) + len(new) > len(self._rows):
            self._grow(len(taken) + len(new), updates)
        free = iter([slot for slot in range(len(self._rows)) if slot not in taken])
        return torch.tensor([next(free) if i in new else self._entries[i].slot for i in arriving])

    def _grow(self, wanted: int, updates: UpdateMatrix) -> None:
        held, layers = len(self._rows), updates.layout.num_layers
        slots = max(wanted, held + held // 2, self.reserve)
        slots = slots if self.capacity is None else min(slots, self.capacity)
        rows = empty_rows(slots, updates.rows, self.device)  # a row is written before one behind it is
        gram = torch.zeros(layers, slots, slots, dtype=torch.float64, device=accumulation_device(rows))
        if held:
            rows[:held], gram[:, :held, :held] = self._rows, self._gram
        self._rows, self._gram = rows, gram


class row_history(Container[RowHistory]):  # noqa: N801 - as property
    """Declares a :class:`RowHistory`, by the rule's attributes for most rows, rows that a fit needs, and device."""

    in_columns, kind = True, RowHistory

    @checked()
    def __init__(self, *, capacity: str, reserve: str, device: str) -> None:
        self._capacity, self._reserve, self._device, self.placement = capacity, reserve, device, (device,)

    def initial(self, rule: object) -> RowHistory:
        return RowHistory(named(rule, self._capacity), named(rule, self._device))

    def by_column(self, state: Any, change: Callable[[Any], Any]) -> Any:
        return {**state, "rows": change(state["rows"])}

    def max_nbytes(self, rule: object, extent: Extent) -> int:
        rows = named(rule, self._reserve)
        return RowHistory.max_nbytes(rows, extent.columns, extent.layers, extent.dtype) if rows else 0
