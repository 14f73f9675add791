# SPDX-License-Identifier: Apache-2.0
"""Inner products among rows that are kept in slots."""

from __future__ import annotations

import torch
from torch import Tensor


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
