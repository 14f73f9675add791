# SPDX-License-Identifier: Apache-2.0
"""What clients send in a round, and which of it may enter the aggregation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isinf
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.ops.dtypes import accumulation_device
from fl_lightning.training.buffers import BufferBank
from fl_lightning.training.upload import Upload

ErrorPolicy = Literal["raise", "drop"]


@dataclass
class Round:
    """A round in progress."""

    index: int
    arrivals: list[Upload] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class UsableUploads:
    """The reports to aggregate.

    Attributes:
        arrivals: ``m`` reports; the row of report ``i`` is row ``i``.
        norms: ``[m]`` norms of the updates, float64 on the CPU.
        train_losses: mean training losses.
    """

    arrivals: list[Upload]
    norms: Tensor
    train_losses: list[float | None]


def usable(
    arrivals: Sequence[Upload], rows: Tensor, bank: BufferBank, drop: Callable[[Upload, str], None]
) -> UsableUploads:
    """Leaves out reports that hold NaN or infinity, and moves the rows of the others to the front.

    Args:
        arrivals: the reports, by ascending row.
        rows: the update matrix; changed in place if somebody is left out.
        bank: the buffers before the round.
        drop: called with every report that is left out, and why.
    """
    if not arrivals:
        return UsableUploads([], torch.zeros(0, dtype=torch.float64), [])
    norms, losses = _magnitudes(arrivals, rows)
    buffers = bank.finite([arrival.buffers for arrival in arrivals]).tolist()
    kept: list[int] = []
    for place, arrival in enumerate(arrivals):
        loss, companions = losses[place], arrival.report.companions
        if not isfinite(float(norms[place])):
            drop(arrival, "its update is not finite")
        elif loss is not None and not isfinite(loss):
            drop(arrival, f"its training loss is {loss}")
        elif arrival.loss is not None and not isfinite(arrival.loss):
            drop(arrival, f"its loss at the global model is {arrival.loss}")
        elif not buffers[place]:
            drop(arrival, "its buffers are not finite")
        elif not all(isfinite(norm_of(row)) for row in companions.values()):
            drop(arrival, f"what it sends besides its update is not finite ({', '.join(companions)})")
        else:
            kept.append(place)
    for place, origin in enumerate(arrivals[k].index for k in kept):
        if place != origin:  # rows only move forward: none is overwritten before it has moved
            rows[place].copy_(rows[origin])
    return UsableUploads([arrivals[k] for k in kept], norms[kept], [losses[k] for k in kept])


def stacked(parts: Sequence[Mapping[str, Tensor]], client_ids: Sequence[int], what: str) -> dict[str, Tensor]:
    """Joins what all clients sent under the same name: ``[m, ...]``.

    Args:
        parts: the clients' tensors by name.
        client_ids: for the error.
        what: for the error.

    Raises:
        ValueError: names or shapes differ between clients.
    """
    shapes = [{name: tuple(value.shape) for name, value in part.items()} for part in parts]
    if any(shape != shapes[0] for shape in shapes):
        found = dict(zip(client_ids, shapes, strict=True))
        raise ValueError(f"{what} must have the same names and shapes from all clients, found {found}")
    return {name: torch.stack([part[name] for part in parts]) for name in shapes[0]}


def norm_of(vector: Tensor) -> float:
    """Euclidean norm of a vector of any floating-point dtype, also where the squares leave its range."""
    norm = float(_norm(vector))
    if not isinf(norm):
        return norm
    return float(torch.linalg.vector_norm(vector.to(accumulation_device(vector)), dtype=torch.float64))


def _magnitudes(arrivals: Sequence[Upload], rows: Tensor) -> tuple[Tensor, list[float | None]]:
    """Norms and training losses, fetched from the device at once."""
    norms = torch.stack([_norm(rows[arrival.index]) for arrival in arrivals])
    losses = [arrival.train_loss for arrival in arrivals if arrival.train_loss is not None]
    given = [loss.detach().reshape(1).to(norms.device, norms.dtype) for loss in losses]
    fetched = torch.cat([norms, *given]).cpu().double()
    norms, remaining = fetched[: len(arrivals)], iter(fetched[len(arrivals) :].tolist())
    for place in norms.isinf().nonzero().flatten().tolist():
        norms[place] = norm_of(rows[arrivals[place].index])
    return norms, [None if arrival.train_loss is None else next(remaining) for arrival in arrivals]


def _norm(vector: Tensor) -> Tensor:
    # Not in float64: that costs ten times as much, and only vectors of huge numbers need it.
    norm: Tensor = torch.linalg.vector_norm(vector, dtype=torch.promote_types(vector.dtype, torch.float32))
    return norm
