# SPDX-License-Identifier: Apache-2.0
"""What clients send in a round, and which of it may enter the aggregation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isinf
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ClientReport
from fl_lightning.buffers import BufferBank, BufferReport
from fl_lightning.ops._reference import accumulation_device

ErrorPolicy = Literal["raise", "drop"]


class ClientError(RuntimeError):
    """A client could not contribute to a round; the message names it and says why."""


@dataclass(frozen=True)
class Arrival:
    """One client's report as it reached the server.

    Attributes:
        index: its row in the update matrix.
        client_id: the client.
        size: training samples.
        train_loss: mean local training loss, if the module reported one.
        loss: loss at the global parameters before training, if asked for.
        report: extras and companions of the client rule.
        buffers: the client's buffers.
    """

    index: int
    client_id: int
    size: int
    train_loss: Tensor | None
    loss: float | None
    report: ClientReport
    buffers: BufferReport


@dataclass
class Round:
    """A round in progress."""

    index: int
    arrivals: list[Arrival] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Usable:
    """The reports to aggregate.

    Attributes:
        arrivals: ``m`` reports; the row of report ``i`` is row ``i``.
        norms: ``[m]`` norms of the updates, float64 on the CPU.
        train_losses: mean training losses.
    """

    arrivals: list[Arrival]
    norms: Tensor
    train_losses: list[float | None]


def usable(arrivals: Sequence[Arrival], rows: Tensor, bank: BufferBank, drop: Callable[[Arrival, str], None]) -> Usable:
    """Leaves out reports that hold NaN or infinity, and moves the rows of the others to the front.

    Args:
        arrivals: the reports, by ascending row.
        rows: the update matrix; changed in place if somebody is left out.
        bank: the buffers before the round.
        drop: called with every report that is left out, and why.
    """
    if not arrivals:
        return Usable([], torch.zeros(0, dtype=torch.float64), [])
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
    return Usable([arrivals[k] for k in kept], norms[kept], [losses[k] for k in kept])


def with_accuracy(report: ClientReport, accuracy: float, module: object) -> ClientReport:
    """Adds what the module says about its accuracy to what the client rule sends.

    Raises:
        ValueError: it is no share between 0 and 1.
    """
    if not 0 <= accuracy <= 1:
        name = type(module).__name__
        raise ValueError(f"{name}.federated_accuracy must return a share between 0 and 1, found {accuracy}")
    return ClientReport({**report.extras, "accuracy": torch.tensor(accuracy, dtype=torch.float64)}, report.companions)


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


def _magnitudes(arrivals: Sequence[Arrival], rows: Tensor) -> tuple[Tensor, list[float | None]]:
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
