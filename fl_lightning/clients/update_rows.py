# SPDX-License-Identifier: Apache-2.0
"""What clients send: uploads, and their updates as the rows of one matrix; the memory in which they train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl_lightning.algorithms.records import ClientReport
from fl_lightning.arguments import trusted
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.buffers import BufferReport
from fl_lightning.clients.schedules import HandSet, StepCounts
from fl_lightning.core.tensors import empty_rows, empty_tensors, foreach_copy_
from fl_lightning.core.update_sum import RunningSum, UpdateSum
from fl_lightning.core.updates import Columns, UpdateMatrix
from fl_lightning.lightning.module.changes import Change


@dataclass(frozen=True)
class Upload:
    """One client's report as it reached the server."""

    index: int  # its row in the update matrix
    client_id: int
    size: int  # training samples
    train_loss: Tensor | None  # mean over local training, if the module reported one
    loss: float | None  # at the global parameters before training, if asked for
    report: ClientReport
    buffers: BufferReport
    client_lr: float | None = None  # mean of its steps, if its optimizer defines one
    step_counts: StepCounts = field(default_factory=StepCounts)  # what its visit counted
    skipped: int = 0  # batches without a loss, with automatic optimization
    module_change: Change = field(default_factory=Change)  # in the module beside parameters and buffers
    hand_set: HandSet = ()  # options of parameter groups
    loss_batch_factor: int | None = None  # see ClientLosses.measure


class UpdateRows:
    """Owns the matrix ``[capacity, n]`` of a round's updates, and what clients send beside them as rows of that length.

    All clients of a process train in the same memory beside it, in which every parameter starts at a 64-byte boundary.
    What a client computes therefore does not depend on where its row lies.
    """

    def __init__(
        self,
        binding: BoundParameters,
        capacity: int,
        allocate: Callable[[int, Tensor], Tensor] | None = None,
        columns: Columns | None = None,
    ) -> None:
        self._binding = binding
        theta = binding.theta
        self.columns = Columns.whole(theta.numel()) if columns is None else columns  # that the matrix holds
        self._allocate = allocate or empty_rows
        self.values = self._matrix(capacity)  # [capacity, n]; with several shards, the columns of this one
        self._training = empty_tensors(binding.layout.shapes, theta)
        self._views: dict[int, list[Tensor]] = {}
        self._received: set[int] = set()
        self._closed = False  # the memory in which clients train holds what the last one of this round has trained
        self._companions: dict[str, Tensor] = {}  # by name, as ``values``
        self._sent: dict[int, tuple[str, ...]] = {}  # names of what arrived beside the updates, by row

    def __len__(self) -> int:
        return len(self.values)

    def _matrix(self, capacity: int) -> Tensor:
        theta = self._binding.theta
        try:
            return self._allocate(capacity, self.columns.part(theta))
        except RuntimeError as error:  # torch.OutOfMemoryError on accelerators
            size = capacity * self.columns.numel * theta.element_size()
            raise MemoryError(
                f"the updates of clients_per_round={capacity} clients need {size:,} B on {theta.device}: sample fewer"
            ) from error

    def begin_round(self) -> None:
        """Nothing of the round before counts any more."""
        self._received.clear()
        self._sent.clear()
        self._closed = False

    # ---- one client

    def row(self, index: int) -> Tensor:
        """``[n]`` memory for the whole update of a client that trains here."""
        return self.values[index]

    def open(self, index: int) -> None:
        """Binds the module to a copy of the global parameters; the client of row ``index`` may train."""
        self._received.discard(index)
        foreach_copy_(self._training, self._binding.global_views)
        self._binding.bind(self._training)

    def reclaim(self) -> None:
        """Brings the trained parameters back where training has moved them to another storage."""
        self._binding.reclaim(self._training)

    def close(self, index: int) -> None:
        """Writes the update ``theta - theta_i`` into row ``index`` and binds the global parameters."""
        parts = zip(self._binding.global_views, self._training, self._views_of(self.row(index)), strict=True)
        for before, after, row in parts:
            torch.sub(before, after, out=row)
        self._binding.bind_global()
        self.received(index)
        self._closed = True

    def reached_by(self, step: Tensor) -> list[Tensor] | None:
        """Parameters that a client has trained here, if a step ``[n]`` is its update bit for bit; else ``None``.

        To subtract the update from the global parameters would round once more.
        """
        parts = zip(self._binding.global_views, self._training, self._binding.layout.views(step), strict=True)
        exact = self._closed and all(torch.equal(before - after, part) for before, after, part in parts)
        return self._training if exact else None

    def _views_of(self, row: Tensor) -> list[Tensor]:
        if row.data_ptr() not in self._views:
            self._views[row.data_ptr()] = self._binding.layout.views(row)
        return self._views[row.data_ptr()]

    def received(self, index: int) -> None:
        """Row ``index`` holds an update: one that was computed elsewhere, or a full gradient."""
        self._received.add(index)

    def complete(self, index: int) -> None:
        """Nothing changes the update in row ``index`` any more before the server sees it."""

    def update(self, index: int) -> Tensor:
        """``[n]`` the whole update of a client that has trained here."""
        self._check(index)
        return self.row(index)

    # ---- the server

    def take_companions(self, index: int, companions: Mapping[str, Tensor]) -> None:
        """Takes what the client of row ``index`` sends beside its update: a copy of vectors ``[n]`` by name."""
        theta = self._binding.theta
        for name, vector in companions.items():
            if vector.shape != theta.shape or vector.dtype != theta.dtype:
                expected, found = (f"{x.dtype} {list(x.shape)}" for x in (theta, vector))
                raise ValueError(f"companion {name!r} must be {expected} as the parameters, found {found}")
            self.companion(name)[index].copy_(vector)
        self._sent[index] = tuple(companions)

    def companion(self, name: str) -> Tensor:
        """``[capacity, n]`` what clients send under a name, beside their updates; made when it is first asked for."""
        if name not in self._companions:
            self._companions[name] = self._matrix(len(self))
        return self._companions[name]

    def companions_of(self, index: int) -> tuple[str, ...]:
        """Names of what the client of row ``index`` has sent beside its update."""
        return self._sent.get(index, ())

    def same_companions(self, clients: Mapping[int, int]) -> tuple[str, ...]:
        """Names of what clients (ids by row) have sent beside their updates, which must be the same from all."""
        found = {client: self.companions_of(index) for index, client in clients.items()}
        names = next(iter(found.values()))
        if any(set(other) != set(names) for other in found.values()):
            raise ValueError(f"companions must have the same names from all clients, found {found}")
        return names

    def norms(self, indices: Sequence[int]) -> Tensor:
        """``[k]`` float64 the norms of the updates in some rows, ascending; not finite where the update is not."""
        for index in indices:
            self._check(index)
        return self._norms(self.values, indices)

    def companion_norms(self, indices: Sequence[int]) -> list[dict[str, float]]:
        """Norms of what the clients of some rows have sent beside their updates; not finite where the vector is not."""
        return [
            {name: float(self._norms(self._companions[name], [index])) for name in self.companions_of(index)}
            for index in indices
        ]

    def _norms(self, rows: Tensor, indices: Sequence[int]) -> Tensor:
        first = indices[0]
        norms = trusted(UpdateMatrix)(rows[first : indices[-1] + 1], self._binding.layout).norms()
        return norms[[index - first for index in indices]]

    def gathered(self, indices: Sequence[int], norms: Tensor | None = None) -> UpdateMatrix:
        """The updates of some rows, ascending, as one matrix; they move to the front, and their companions do, too."""
        for place, origin in enumerate(indices):
            self._check(origin)
            if place != origin:  # rows only move forward: none is overwritten before it has moved
                self.values[place].copy_(self.values[origin])
                for name in self.companions_of(origin):
                    self._companions[name][place].copy_(self._companions[name][origin])
                self._sent[place] = self.companions_of(origin)
                self.received(place)
        return trusted(UpdateMatrix)(self.values[: len(indices)], self._binding.layout, self.columns, norms)

    def _check(self, index: int) -> None:
        if index not in self._received:
            raise ValueError(f"row {index} must hold a client's update of this round, found none")


class SummedRows(UpdateRows):
    """One row, in which every client's update arrives, and the sum of the round's updates in place of the matrix."""

    def __init__(self, binding: BoundParameters, capacity: int) -> None:
        super().__init__(binding, 1)
        self._capacity, self._sum = capacity, RunningSum(self.values[0])
        self._weights: dict[int, float] = {}  # by row, of all clients of the round
        self._complete: dict[int, Tensor] = {}  # norms of updates that are in the sum

    def __len__(self) -> int:
        return self._capacity

    def row(self, index: int) -> Tensor:
        """See the base class; the same memory for all."""
        return self.values[0]

    def begin_round(self) -> None:
        """See the base class."""
        super().begin_round()
        if not len(self.values):
            self.values = self._matrix(1)
        self._sum.clear()
        self._complete.clear()

    def expect(self, indices: Sequence[int], weights: Tensor | None) -> None:
        """The rows of the round's clients, and their weights ``[m]``."""
        self._weights = dict(zip(indices, [] if weights is None else weights.tolist(), strict=True))

    def complete(self, index: int) -> None:
        """Adds the update to the sum."""
        row = self.update(index)
        self._complete[index] = trusted(UpdateMatrix)(row[None], self._binding.layout).norms()
        self._sum.add(row, self._weights[index])

    def norms(self, indices: Sequence[int]) -> Tensor:
        """See the base class."""
        return torch.cat([self._complete[index] for index in indices])

    def gathered(self, indices: Sequence[int], norms: Tensor | None = None) -> UpdateMatrix:
        """The sum, in the memory of the row; the next round gets another one."""
        step, self.values = self.values[0], self.values.new_empty(0, self.columns.numel)
        self._views.clear()
        self._sum.put(step)
        weights = torch.tensor([self._weights[index] for index in indices], dtype=torch.float64)
        return UpdateSum(step, weights, self.norms(indices) if norms is None else norms, self._binding.layout)
