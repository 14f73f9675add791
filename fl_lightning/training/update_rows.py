# SPDX-License-Identifier: Apache-2.0
"""The rows of a round, one update per client, and the memory in which clients train."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fl_lightning.core.aligned import empty_rows, empty_tensors
from fl_lightning.core.updates import UpdateMatrix
from fl_lightning.training.bound_parameters import BoundParameters


class UpdateRows:
    """Owns the matrix ``[capacity, n]`` of a round's updates.

    All clients of a process train in the same memory beside it, in which every parameter starts at a 64-byte boundary.
    What a client computes therefore does not depend on where its row lies.

    Args:
        binding: the bound module.
        capacity: the largest number of clients in a round.
        allocate: gives uninitialised memory ``[capacity, n]``, whose rows are contiguous, for this number and global
            parameters like these; ``None``: on their device.

    Attributes:
        values: ``[capacity, n]`` the memory itself.

    Raises:
        MemoryError: the matrix does not fit on the device.
    """

    def __init__(
        self, binding: BoundParameters, capacity: int, allocate: Callable[[int, Tensor], Tensor] | None = None
    ) -> None:
        self._binding = binding
        theta = binding.theta
        try:
            self.values = (allocate or empty_rows)(capacity, theta)
            self._training = empty_tensors(binding.layout.shapes, theta)
        except RuntimeError as error:  # torch.OutOfMemoryError on accelerators
            size = capacity * theta.numel() * theta.element_size()
            raise MemoryError(
                f"the updates of clients_per_round={capacity} clients need {size:,} B on {theta.device}: sample fewer"
            ) from error
        self._views = [binding.layout.views(row) for row in self.values]
        self._received: set[int] = set()

    def __len__(self) -> int:
        return len(self.values)

    def holds_update(self, index: int) -> bool:
        """Whether row ``index`` holds an update of this round."""
        return index in self._received

    def begin_round(self) -> None:
        """Nothing of the round before counts any more."""
        self._received.clear()

    # ---- one client

    def open(self, index: int) -> None:
        """Binds the module to a copy of the global parameters; the client of row ``index`` may train."""
        self._received.discard(index)
        torch._foreach_copy_(self._training, self._binding.global_views)
        self._binding.bind(self._training)

    def settle(self) -> None:
        """Brings the trained parameters back where training has moved them to another storage."""
        self._binding.settle(self._training)

    def close(self, index: int) -> None:
        """Writes the update ``theta - theta_i`` into row ``index`` and binds the global parameters."""
        parts = zip(self._binding.global_views, self._training, self._views[index], strict=True)
        for before, after, row in parts:
            torch.sub(before, after, out=row)
        self._binding.bind_global()
        self.received(index)

    def received(self, index: int) -> None:
        """Row ``index`` holds an update: one that was computed elsewhere, or a full gradient."""
        self._received.add(index)

    # ---- the server

    def update(self, index: int) -> Tensor:
        """``[n]`` the update in row ``index``.

        Raises:
            ValueError: the row holds no update.
        """
        if index not in self._received:
            raise ValueError(f"row {index} must hold a client's update of this round, found none")
        return self.values[index]

    def norms(self, indices: Sequence[int]) -> Tensor:
        """``[k]`` float64 the norms of the updates in some rows; not finite where the update is not.

        Args:
            indices: ascending, at least one.

        Raises:
            ValueError: a row holds no update.
        """
        for index in indices:
            self.update(index)
        first = indices[0]
        norms = UpdateMatrix(self.values[first : indices[-1] + 1], self._binding.layout).norms()
        return norms[[index - first for index in indices]]

    def norm(self, vector: Tensor) -> Tensor:
        """``[1]`` float64 the norm of a vector ``[n]``; not finite if the vector is not."""
        return UpdateMatrix(vector[None], self._binding.layout).norms()

    def gathered(self, indices: Sequence[int], norms: Tensor | None = None) -> UpdateMatrix:
        """The updates of some rows as one matrix; they move to the front.

        Args:
            indices: ascending.
            norms: of these updates, if they are known.
        """
        for place, origin in enumerate(indices):
            row = self.update(origin)
            if place != origin:  # rows only move forward: none is overwritten before it has moved
                self.values[place].copy_(row)
                self.received(place)
        return UpdateMatrix(self.values[: len(indices)], self._binding.layout, norms=norms)
