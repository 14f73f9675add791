# SPDX-License-Identifier: Apache-2.0
"""What methods with a model, or layers, of each client's own keep between rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fl_lightning.arguments import check_unused
from fl_lightning.core.model_snapshot import Snapshot
from fl_lightning.core.storage.model_files import ClientFiles
from fl_lightning.core.storage.models import ClientModels


class OwnModels:
    """Each client's own model or layers: in memory on the CPU and in the checkpoint, or in files that it refers to.

    Args:
        method: the method's name, for errors.
        directory: of the files, see :class:`ClientFiles`; ``None``: memory.
        keep_checkpoints: as there.
    """

    def __init__(self, method: str, directory: str | None = None, keep_checkpoints: int | None = 2) -> None:
        if directory is None and keep_checkpoints is not None:
            why = "without directory, because all checkpoints hold their models themselves"
            check_unused(f"keep_checkpoints of {method}", keep_checkpoints, 2, why)
        self.method, self._directory = method, directory
        self._held = ClientModels("cpu") if directory is None else ClientFiles(directory, keep_checkpoints)

    def get(self, client_id: int) -> Snapshot | None:
        """What the client has, on the CPU, or ``None`` before its first round is over."""
        return self._held.get(client_id)

    def keep(self, client_id: int, kept: Mapping[str, Tensor], when: int) -> None:
        """Replaces what the client has by what it kept of its visit in round ``when``: ``params`` and ``buffers``."""
        self._held.set(client_id, Snapshot(**kept), when)

    def planned_nbytes(self, each: int, num_clients: int, cohort_size: int) -> int:
        """Bytes on the CPU, at ``each`` per client: those of all clients, or with files of a round."""
        return ((num_clients if self._directory is None else 0) + cohort_size) * each

    def clear(self) -> None:
        """Forgets everything; files stay where they are."""
        self._held.clear()

    def state_dict(self) -> dict[str, Any]:
        """The models, or which files they are in."""
        return self._held.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`.

        Raises:
            ValueError: the state is of models that were kept elsewhere.
            FileNotFoundError: a file that it refers to is gone.
        """
        here = self._directory is not None
        if ("files" in state) != here:
            there = "itself: leave directory out" if here else f"in files: give {self.method} the same directory"
            raise ValueError(f"the checkpoint has the personal models {there}")
        self._held.load_state_dict(state)

    def restored(self, state: Mapping[str, Any]) -> OwnModels:
        """Another object with what a state has, in the same place; this one stays as it is.

        Raises:
            ValueError: the state is of models that were kept elsewhere.
            FileNotFoundError: a file that it refers to is gone.
        """
        other = OwnModels(self.method, self._directory)
        other.load_state_dict(state)
        return other
