# SPDX-License-Identifier: Apache-2.0
"""One model per client, kept across rounds: parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fl_lightning.core.model_snapshot import Snapshot
from fl_lightning.core.storage.tensors import ClientTensors


class ClientModels:
    """One :class:`~fl_lightning.core.model_snapshot.Snapshot` per client id, created on first write.

    Args:
        device: where they live; ``None``: where the first write comes from.
        capacity: most clients to keep; those written longest ago leave first. ``None``: no limit.

    Raises:
        ValueError: ``capacity`` is not positive.
    """

    def __init__(self, device: torch.device | str | None = None, capacity: int | None = None) -> None:
        self._params, self._buffers = ClientTensors(device, capacity), ClientTensors(device, capacity)

    def __len__(self) -> int:
        return len(self._params)

    def __contains__(self, client_id: int) -> bool:
        return client_id in self._params

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._params.nbytes + self._buffers.nbytes

    def get(self, client_id: int) -> Snapshot | None:
        """The client's model (not a copy), or ``None`` if there is none."""
        params, buffers = self._params.get(client_id), self._buffers.get(client_id)
        return None if params is None or buffers is None else Snapshot(params, buffers)

    def set(self, client_id: int, model: Snapshot, when: int = 0) -> None:
        """Replaces the client's model by a copy of ``model``; the round ``when`` makes no difference here."""
        self._params.set(client_id, model.params)
        self._buffers.set(client_id, model.buffers)

    def clear(self) -> None:
        """Forgets everything."""
        self._params.clear()
        self._buffers.clear()

    def state_dict(self) -> dict[str, Any]:
        """Ids and tensors; the tensors share memory with this object."""
        return {"params": self._params.state_dict(), "buffers": self._buffers.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self._params.load_state_dict(state["params"])
        self._buffers.load_state_dict(state["buffers"])
