# SPDX-License-Identifier: Apache-2.0
"""What rules remember of clients between rounds: their last update, with its inner products."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning import ops
from fl_lightning.core.tensors import empty_rows, first_rows
from fl_lightning.core.updates import UpdateMatrix
from fl_lightning.ops.dtypes import accumulation_device


def moved(small: Tensor, beside: Tensor) -> Tensor:
    """A small tensor of the CPU where another is; the copy is queued, and nothing waits for it."""
    return small.to(beside.device, non_blocking=True)


class GramCache:
    """Inner products of all pairs of slots, per layer, on any device, and on the CPU which of them are computed.

    Slots are int64 tensors on the CPU. Nothing is read from the device, so nothing waits for it, unless a restored
    cache has to find out what is known.
    """

    def __init__(self, gram: Tensor, known: Tensor | None = None) -> None:
        self.gram = gram  # [L, C, C] float64; NaN stands for what is not computed
        self._known = ~gram.isnan().any(0).cpu() if known is None else known

    @classmethod
    def empty(cls, layers: int, slots: int, device: torch.device | str = "cpu") -> GramCache:
        """Products of which none is computed."""
        gram = torch.full((layers, slots, slots), torch.nan, dtype=torch.float64, device=device)
        return cls(gram, torch.zeros(slots, slots, dtype=torch.bool))

    def to(self, device: torch.device) -> GramCache:
        """The same on a device."""
        return GramCache(self.gram.to(device), self._known)

    def grown(self, slots: int, device: torch.device) -> GramCache:
        """The same with more slots."""
        held, result = self.gram.shape[-1], GramCache.empty(len(self.gram), slots, device)
        result.gram[:, :held, :held], result._known[:held, :held] = self.gram, self._known
        return result

    def complete(self, slots: Tensor) -> bool:
        """Whether the products of all pairs of some slots are computed."""
        return bool(self._known[slots[:, None], slots].all())

    def fill(self, slots: Tensor, computed: Tensor) -> None:
        """Puts ``computed`` ``[L, h, h]`` where the products of some slots are not computed yet."""
        held = self.among(slots)
        self.put(slots, torch.where(held.isnan(), computed, held))

    def among(self, slots: Tensor) -> Tensor:
        """``[L, h, h]`` products of the pairs of some slots."""
        there = moved(slots, self.gram)
        return self.gram[:, there[:, None], there]

    def put(self, slots: Tensor, products: Tensor) -> None:
        """Replaces the products of the pairs of some slots by ``[L, h, h]``."""
        there = moved(slots, self.gram)
        self.gram[:, there[:, None], there] = products
        self._known[slots[:, None], slots] = True

    def clear(self, slots: Tensor) -> None:
        """Products with some slots are no longer computed."""
        there = moved(slots, self.gram)
        self.gram.index_fill_(1, there, torch.nan).index_fill_(2, there, torch.nan)
        self._known[slots] = self._known[:, slots] = False

    def put_cross(self, slots: Tensor, others: Tensor, products: Tensor) -> None:
        """Products ``[L, h, k]`` of some slots with some others."""
        there, beside = moved(slots, self.gram), moved(others, self.gram)
        self.gram[:, there[:, None], beside] = products
        self.gram[:, beside[:, None], there] = products.mT
        self._known[slots[:, None], others] = self._known[others[:, None], slots] = True


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

    Products lie there per layer; what :meth:`joint_gram` has computed is reused when the new rows are remembered, so a
    round computes products of new rows only. A product that no round has needed yet is NaN inside and computed on
    demand. The first row makes room for ``reserve`` rows, of which a CPU's memory holds what is written; beyond them
    storage grows by half, and the old one and the new one exist at once. It never exceeds ``capacity`` rows: those of
    the oldest rounds leave first (among equals, larger client ids). Products lie beside the rows, which live on
    ``device``, or beside the updates; nothing but :meth:`load_state_dict` looks at them, so a device is not waited for.
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
        self._products = GramCache.empty(0, 0)  # without the scales, beside the rows
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
        gone = set(leaving).difference(clients)
        staying = torch.tensor(sorted(e.slot for i, e in self._entries.items() if i not in gone))
        products = updates.beside(rows).cross_gram(self._rows[: self._top()], staying)
        self._fresh = _Fresh(updates, rows, staying, products)
        if not self._products.complete(slots):
            self._products.fill(slots, updates.beside(self._rows[moved(slots, self._rows)]).gram())
        there, scales = moved(torch.searchsorted(staying, slots), products), moved(scales, products)
        cross = (products[:, :, there] * scales).to(gram.device)
        among = (self._products.among(slots) * torch.outer(scales, scales)).to(gram.device)
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
        step, weights = step.to(self._rows.device), weights.to(self._products.gram.device)
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
        fresh = self._fresh if self._fresh is not None and self._fresh.updates is updates else None
        self._fresh = None
        if self._rows.numel():
            self._check(updates)
        slots, where = self._assign(list(retained.values()), updates), torch.tensor(list(retained))
        rows = updates.rows if fresh is None else fresh.rows
        factors = torch.as_tensor(scales, dtype=torch.float64).expand(len(updates)).tolist()
        for slot, (position, client) in zip(slots.tolist(), retained.items(), strict=True):
            self._rows[slot].copy_(rows[position])
            self._entries[client] = _Entry(slot, when, factors[position])
        self._products.clear(slots)
        if fresh is not None:
            self._products.put_cross(slots, fresh.slots, fresh.products[:, moved(where, fresh.products)])
        # Last, because it also replaces the products with rows that these slots held before.
        own = updates.gram()
        where = moved(where, own)
        self._products.put(slots, own[:, where[:, None], where].to(self._products.gram.device))

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
            "gram": self._products.gram[:, :top, :top].contiguous(),
            "clients": torch.tensor([[i, e.slot, e.round] for i, e in entries], dtype=torch.int64).view(-1, 3),
            "scales": torch.tensor([e.scale for _, e in entries], dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, products bit for bit."""
        self.clear()
        if len(state["clients"]):
            self._rows = empty_rows(len(state["rows"]), state["rows"], self.device).copy_(state["rows"])
            self._products = GramCache(state["gram"].to(accumulation_device(self._rows), copy=True))
        for (client, slot, when), scale in zip(state["clients"].tolist(), state["scales"].tolist(), strict=True):
            self._entries[client] = _Entry(slot, when, scale)

    def _top(self) -> int:
        return max((e.slot for e in self._entries.values()), default=-1) + 1

    def _slots(self, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
        entries = [self._entries[i] for i in clients]
        return torch.tensor([e.slot for e in entries]), torch.tensor([e.scale for e in entries], dtype=torch.float64)

    def _check(self, updates: UpdateMatrix) -> None:
        rows, held, layers, found = updates.rows, self._rows, len(self._products.gram), len(updates.gram())
        if rows.shape[1] != held.shape[1] or rows.dtype != held.dtype or found != layers:
            raise ValueError(
                f"updates must match the remembered rows, {layers} layers, {held.shape[1]} columns, "
                f"{held.dtype}; found {found}, {rows.shape[1]}, {rows.dtype}"
            )
        if self.device is None and held.device != rows.device:  # a restored history may come from another device
            self._rows = empty_rows(len(held), held, rows.device).copy_(held)
            self._products = self._products.to(accumulation_device(rows))

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
        there = accumulation_device(rows)
        if held:
            rows[:held] = self._rows
        products = self._products.grown(slots, there) if held else GramCache.empty(layers, slots, there)
        self._rows, self._products = rows, products
