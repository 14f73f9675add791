# SPDX-License-Identifier: Apache-2.0
"""One tensor per client, kept across rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class ClientTensors:
    """One flat tensor per client id, created on first write.

    Args:
        device: where they live; ``None``: where the first write comes from.
        capacity: most clients to keep; those written longest ago leave first. ``None``: no limit.

    Raises:
        ValueError: ``capacity`` is not positive.
    """

    def __init__(self, device: torch.device | str | None = None, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1 client, found {capacity}")
        self.capacity = capacity
        self.device = None if device is None else torch.device(device)
        self._tensors: dict[int, Tensor] = {}  # in the order of the last writes

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, client_id: int) -> bool:
        return client_id in self._tensors

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in self._tensors.values())

    def get(self, client_id: int) -> Tensor | None:
        """The client's tensor (not a copy), or ``None`` before its first write."""
        return self._tensors.get(client_id)

    def set(self, client_id: int, value: Tensor) -> None:
        """Replaces the client's tensor by a copy of ``value``."""
        self._tensors.pop(client_id, None)
        if self.capacity is not None and len(self._tensors) >= self.capacity:
            del self._tensors[next(iter(self._tensors))]
        self._tensors[client_id] = value.detach().to(self.device or value.device, copy=True)

    def add(self, client_id: int, value: Tensor) -> None:
        """Adds ``value`` to the client's tensor, which counts as zero before its first write.

        Raises:
            ValueError: the shape differs from what the client has.
        """
        held = self._tensors.get(client_id)
        if held is None:
            self.set(client_id, value)
            return
        if held.shape != value.shape:
            raise ValueError(f"value must have shape {tuple(held.shape)}, found {tuple(value.shape)}")
        held += value.detach().to(held.device)
        self._tensors[client_id] = self._tensors.pop(client_id)

    def clear(self) -> None:
        """Forgets everything."""
        self._tensors.clear()

    def state_dict(self) -> dict[str, Any]:
        """Ids in the order of their last writes, and tensors; these share memory with this object."""
        ids = torch.tensor(list(self._tensors), dtype=torch.int64)
        return {"clients": ids, "tensors": list(self._tensors.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        pairs = zip(state["clients"].tolist(), state["tensors"], strict=True)
        self._tensors = {i: t.to(self.device or t.device, copy=True) for i, t in pairs}
