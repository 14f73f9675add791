# SPDX-License-Identifier: Apache-2.0
"""The rows of a round: one flat vector per client, first its parameters, then its update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor

from fl_lightning.core.updates import UpdateMatrix
from fl_lightning.training.bound_parameters import BoundParameters


class RowContent(Enum):
    """What a row holds."""

    NOTHING = "nothing"
    PARAMETERS = "the parameters of a client in training"
    UPDATE = "a client's update"


class UpdateRows:
    """Owns the matrix ``[capacity, n]`` of a round.

    Args:
        binding: the bound module.
        capacity: the largest number of clients in a round.
        allocate: gives uninitialised memory ``[capacity, n]`` for this number and global parameters like these;
            ``None``: on their device.

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
        except RuntimeError as error:  # torch.OutOfMemoryError on accelerators
            size = capacity * theta.numel() * theta.element_size()
            raise MemoryError(
                f"the updates of clients_per_round={capacity} clients need {size:,} B on {theta.device}: sample fewer"
            ) from error
        self._views = [binding.layout.views(row) for row in self.values]
        self._contents = [RowContent.NOTHING] * capacity

    def __len__(self) -> int:
        return len(self.values)

    def content(self, index: int) -> RowContent:
        """What row ``index`` holds."""
        return self._contents[index]

    def begin_round(self) -> None:
        """Nothing of the round before counts any more."""
        self._contents = [RowContent.NOTHING] * len(self)

    # ---- one client

    def open(self, index: int) -> Tensor:
        """Fills row ``index`` with the global parameters and binds the module to it; the client may train."""
        row = self.values[index]
        row.copy_(self._binding.theta)
        self._binding.bind(self._views[index])
        self._contents[index] = RowContent.PARAMETERS
        return row

    def settle(self, index: int) -> None:
        """Makes row ``index`` hold the trained parameters also where training moved them to another storage."""
        self._binding.settle(self._views[index])

    def close(self, index: int) -> None:
        """Turns the parameters in row ``index`` into the update ``theta - theta_i`` and binds the global ones."""
        row = self.values[index]
        torch.sub(self._binding.theta, row, out=row)
        self._binding.bind_global()
        self.received(index)

    def received(self, index: int) -> None:
        """Row ``index`` holds an update: one that was computed elsewhere, or a full gradient."""
        self._contents[index] = RowContent.UPDATE

    # ---- the server

    def update(self, index: int) -> Tensor:
        """``[n]`` the update in row ``index``.

        Raises:
            ValueError: the row holds no update.
        """
        if self._contents[index] is not RowContent.UPDATE:
            raise ValueError(f"row {index} must hold a client's update, found {self._contents[index].value}")
        return self.values[index]

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
                self._contents[place] = RowContent.UPDATE
        return UpdateMatrix(self.values[: len(indices)], self._binding.layout, norms=norms)


def empty_rows(number: int, like: Tensor) -> Tensor:
    """Uninitialised memory ``[number, n]`` beside the global parameters ``[n]``."""
    return torch.empty(number, like.numel(), dtype=like.dtype, device=like.device)
