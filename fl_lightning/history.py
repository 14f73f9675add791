# SPDX-License-Identifier: Apache-2.0
"""What rules remember about clients between rounds: their last update with its inner products, or one tensor each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning import ops
from fl_lightning.client_tensors import ClientTensors
from fl_lightning.updates import ParamLayout, UpdateMatrix

__all__ = ["ClientTensors", "RowHistory"]

_MIN_BLOCK = 8  # rows that are allocated together, so that small cohorts do not end in many small products


class _Entry(NamedTuple):
    slot: int
    round: int
    scale: float


class _Fresh(NamedTuple):
    updates: UpdateMatrix
    rows: Tensor
    products: Tensor


class RowHistory:
    """The last update of each client, and the inner products among the remembered ones.

    Rows lie in blocks that are allocated when first needed and never moved. Products are kept per layer; what
    :meth:`joint_gram` has computed is reused when the new rows are remembered, so a round computes products of new rows
    only. A product that no round has needed yet is NaN inside and computed on demand.

    Args:
        capacity: most rows to keep; rows of the oldest rounds leave first (among equals, larger client ids).
            ``None``: no limit.
        device: where the rows live; ``None``: beside the updates. Products with rows elsewhere are computed there.

    Raises:
        ValueError: ``capacity`` is not positive.
    """

    def __init__(self, capacity: int | None = None, device: torch.device | str | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1 row, found {capacity}")
        self.capacity = capacity
        self.device = None if device is None else torch.device(device)
        self.clear()

    def clear(self) -> None:
        """Forgets every row and frees the memory."""
        self._entries: dict[int, _Entry] = {}
        self._blocks: list[Tensor] = []
        self._gram = torch.empty(0, 0, 0, dtype=torch.float64)  # [L, C, C] over all slots, unscaled, on the CPU
        self._fresh: _Fresh | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, client_id: int) -> bool:
        return client_id in self._entries

    @property
    def nbytes(self) -> int:
        """Bytes held by rows and products."""
        return sum(t.numel() * t.element_size() for t in (*self._blocks, self._gram))

    def planned_nbytes(self, clients: int, cohort_size: int, layout: ParamLayout, dtype: torch.dtype) -> int:
        """Bytes held at most with rows of ``clients`` clients, of which ``cohort_size`` arrive per round."""
        block = _block_rows(cohort_size, self.capacity)
        slots = -(-min(clients, self.capacity or clients) // block) * block
        return slots * layout.numel * dtype.itemsize + layout.num_layers * slots * slots * 8

    def select(self, exclude: Collection[int] = (), since: float | None = None) -> list[int]:
        """Remembered clients, those of the newest round first, then by id.

        Args:
            exclude: ids to leave out.
            since: first round that counts; ``None``: all.
        """
        chosen = [i for i, e in self._entries.items() if i not in exclude and (since is None or e.round >= since)]
        return sorted(chosen, key=lambda i: (-self._entries[i].round, i))

    def joint_gram(self, updates: UpdateMatrix, clients: Sequence[int]) -> Tensor:
        """Gram matrices of the new rows followed by the remembered rows of ``clients``.

        Args:
            updates: ``m`` new rows.
            clients: ``h`` remembered client ids.

        Returns:
            ``[L, m + h, m + h]`` float64 on the CPU; remembered rows carry the scale given to :meth:`remember`.

        Raises:
            KeyError: a client is not remembered.
            ValueError: the new rows do not fit the remembered ones.
        """
        self._fresh = None
        gram = updates.gram().cpu()
        if not clients:
            return gram
        self._check(updates)
        offsets, slots, scales = updates.layout.offsets, *self._slots(clients)
        rows = updates.rows.to(self._blocks[0].device)
        products = torch.cat([ops.layer_cross_gram(rows, block, offsets).cpu() for block in self._blocks], 2)
        self._fresh = _Fresh(updates, rows, products)
        self._fill(slots, offsets)
        cross = products[:, :, slots] * scales
        among = self._gram[:, slots][:, :, slots] * torch.outer(scales, scales)
        return torch.cat([torch.cat([gram, cross], 2), torch.cat([cross.mT, among], 2)], 1)

    def combine(self, updates: UpdateMatrix, coeff: Tensor, clients: Sequence[int]) -> Tensor:
        """Linear combination of new and remembered rows, rounded once.

        Args:
            updates: ``m`` new rows.
            coeff: ``[L, m + h]`` float64 on the CPU, in the order of :meth:`joint_gram`.
            clients: ``h`` remembered client ids.

        Returns:
            ``[n]`` on the device and in the dtype of the new rows.
        """
        m, rows, offsets = len(updates), updates.rows, updates.layout.offsets
        if not clients:
            return updates.combine(coeff)
        slots, scales = self._slots(clients)
        spread = coeff.new_zeros(coeff.shape[0], self._gram.shape[1])
        spread[:, slots] = coeff[:, m:] * scales
        # New and remembered parts may cancel, so they are summed before the result is rounded to the rows' dtype.
        wide = torch.float32 if rows.device.type == "mps" else torch.float64
        step = updates.combine(coeff[:, :m], out=torch.zeros(rows.shape[1], dtype=wide, device=rows.device))
        part = step.to(self._blocks[0].device)
        for index, block in enumerate(self._blocks):
            ops.layer_combine(block, offsets, spread[:, index * len(block) : (index + 1) * len(block)], part)
        return part.to(rows.device, rows.dtype)

    def remember(
        self, updates: UpdateMatrix, clients: Mapping[int, int], when: int, scales: Tensor | float = 1.0
    ) -> None:
        """Stores new rows in place of the clients' old ones.

        Args:
            updates: ``m`` new rows.
            clients: row position to client id, of the rows to store; at most the first ``capacity`` are.
            when: the round they come from.
            scales: ``[m]`` or a number: factors that products and combinations apply to the stored rows.

        Raises:
            ValueError: the new rows do not fit the remembered ones.
        """
        kept = dict(list(clients.items())[: self.capacity])
        if not kept:
            return
        fresh = self._fresh if self._fresh is not None and self._fresh.updates is updates else None
        self._fresh = None
        if self._blocks:
            self._check(updates)
        slots, where = self._assign(list(kept.values()), updates), list(kept)
        rows, size = updates.rows if fresh is None else fresh.rows, len(self._blocks[0])
        factors = torch.as_tensor(scales, dtype=torch.float64).expand(len(updates)).tolist()
        for slot, position in zip(slots, where, strict=True):
            self._blocks[slot // size][slot % size].copy_(rows[position])
            self._entries[kept[position]] = _Entry(slot, when, factors[position])
        self._gram[:, slots] = torch.nan
        self._gram[:, :, slots] = torch.nan
        if fresh is not None:
            old = fresh.products.shape[2]
            self._gram[:, slots, :old] = fresh.products[:, where]
            self._gram[:, :old, slots] = fresh.products[:, where].mT
        # Last, because it also replaces the products with rows that these slots held before.
        index = torch.tensor(slots, dtype=torch.int64)
        self._gram[:, index[:, None], index] = updates.gram().cpu()[:, where][:, :, where]

    def forget(self, before: int) -> None:
        """Forgets rows of rounds earlier than ``before``; their memory is used again."""
        self._entries = {i: e for i, e in self._entries.items() if e.round >= before}

    def state_dict(self) -> dict[str, Any]:
        """Rows, products and their bookkeeping; the tensors share memory with the history."""
        entries = sorted(self._entries.items())
        return {
            "blocks": list(self._blocks),
            "gram": self._gram,
            "clients": torch.tensor([[i, e.slot, e.round] for i, e in entries], dtype=torch.int64).view(-1, 3),
            "scales": torch.tensor([e.scale for _, e in entries], dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, products bit for bit."""
        self.clear()
        self._blocks = [block.to(self.device or block.device, copy=True) for block in state["blocks"]]
        self._gram = state["gram"].to("cpu", copy=True)
        for (client, slot, when), scale in zip(state["clients"].tolist(), state["scales"].tolist(), strict=True):
            self._entries[client] = _Entry(slot, when, scale)

    def _slots(self, clients: Sequence[int]) -> tuple[list[int], Tensor]:
        entries = [self._entries[i] for i in clients]
        return [e.slot for e in entries], torch.tensor([e.scale for e in entries], dtype=torch.float64)

    def _check(self, updates: UpdateMatrix) -> None:
        block, rows = self._blocks[0], updates.rows
        found, held = (updates.layout.num_layers, rows.shape[1]), (self._gram.shape[0], block.shape[1])
        if found != held or rows.dtype != block.dtype:
            raise ValueError(
                f"updates must match the remembered rows, {held[0]} layers, {held[1]} columns, {block.dtype}; "
                f"found {found[0]}, {found[1]}, {rows.dtype}"
            )
        if self.device is None and block.device != rows.device:  # restored from another device
            self._blocks = [b.to(rows.device) for b in self._blocks]

    def _fill(self, slots: Sequence[int], offsets: Tensor) -> None:
        """Computes the products among these slots that no earlier round has computed."""
        wanted = torch.zeros(self._gram.shape[1], dtype=torch.bool)
        wanted[slots] = True
        missing = self._gram[0].isnan() & wanted & wanted[:, None]
        size = len(self._blocks[0])
        pairs = {(a, b) for a, b in missing.nonzero().div(size, rounding_mode="floor").tolist() if a <= b}
        for a, b in sorted(pairs):
            one, two = slice(a * size, (a + 1) * size), slice(b * size, (b + 1) * size)
            new = ops.layer_cross_gram(self._blocks[a], self._blocks[b], offsets).cpu()
            filled = torch.where(self._gram[:, one, two].isnan(), new, self._gram[:, one, two])
            self._gram[:, one, two] = filled = filled.triu() + filled.triu(1).mT if a == b else filled
            self._gram[:, two, one] = filled.mT

    def _assign(self, arriving: list[int], updates: UpdateMatrix) -> list[int]:
        """Slots for the clients: the ones they have, else the lowest free ones, after the oldest have left."""
        if self.capacity is not None:
            for client in self.select(exclude=arriving)[self.capacity - len(arriving) :]:
                del self._entries[client]
        taken = {e.slot for e in self._entries.values()}
        new = [i for i in arriving if i not in self._entries]
        free = [slot for slot in range(self._gram.shape[1]) if slot not in taken]
        while len(free) < len(new):
            held = self._gram.shape[1]
            self._grow(updates, len(arriving))
            free += range(held, self._gram.shape[1])
        slot_of = dict(zip(new, free, strict=False)) | {i: self._entries[i].slot for i in arriving if i not in new}
        return [slot_of[i] for i in arriving]

    def _grow(self, updates: UpdateMatrix, arriving: int) -> None:
        rows, held = updates.rows, self._gram.shape[1]
        size = len(self._blocks[0]) if self._blocks else _block_rows(arriving, self.capacity)
        home = self.device or rows.device
        self._blocks.append(torch.zeros(size, rows.shape[1], dtype=rows.dtype, device=home))
        gram = self._gram.new_full((updates.layout.num_layers, held + size, held + size), torch.nan)
        if held:
            gram[:, :held, :held] = self._gram
        self._gram = gram


def _block_rows(arriving: int, capacity: int | None) -> int:
    size = max(_MIN_BLOCK, arriving)
    return size if capacity is None else min(size, capacity)
