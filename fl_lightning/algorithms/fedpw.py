# SPDX-License-Identifier: Apache-2.0
"""FedPW: Rethinking Fair Federated Learning from Parameter and Client View.

Kaiqi Guan, Wenke Huang, Xianda Guo, Yueyang Yuan, Bin Yang, Mang Ye. NeurIPS 2025.
https://openreview.net/forum?id=dY29IUPTuy https://github.com/guankaiqi/FedPW
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.rows import require_finite
from fl_lightning.algorithms._shared.weighting import nonnegative_losses, shares, stands_still, weighted_mean
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Federation, Needs, StepReport
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.declared import server_state
from fl_lightning.core.storage.per_client import PerClient, per_client
from fl_lightning.core.updates import Columns, UpdateMatrix

LEAST = 1e-12  # of a loss beside the largest one


class FedPW(ServerRule):
    """Leaves out small numbers of updates, enlarges those that clients agree on, and weighs clients by phase.

    Parameter adjustment (equations 5 to 7): of each tensor, a client's update loses the share of its numbers that are
    smallest in size. The share is ``drop_rate`` in the mean, and larger for clients with smaller losses. Where clients
    agree most on a step, it grows by what was left out.

    Adaptive weights (equations 9 to 11): early, clients whose updates point along those of the others count more; later
    those with large losses. Two sets of weights follow the shares of these quantities, with a momentum that grows as
    the quantities fall, and the set that is spread wider counts for more.

    In the first round, and in one with a single client, updates stay as they are. A client that is new starts at the
    mean weight. Absent clients keep their weights: those of a round's clients are divided among these. If all rows are
    zero, the step is zero, flagged, and nothing changes.

    Args:
        drop_rate: the share of an update's numbers that is left out, in the mean over clients, and the share of a
            tensor that is enlarged; 0 leaves updates as they are.
        beta: how fast weights follow in the first round; 0 weighs clients alike.

    Raises:
        ValueError: an argument is out of range.
    """

    needs = Needs(losses=True)
    reads = "rows"
    layers = "tensor"

    p, p_gains, p_first = per_client(float), per_client(float), server_state(0.0)
    q, q_gains, q_first = per_client(float), per_client(float), server_state(0.0)

    @checked(drop_rate=Bounds(0, below=1), beta=Bounds(0, 1))
    def __init__(self, drop_rate: float = 0.3, beta: float = 0.3) -> None:
        self.drop_rate, self.beta = drop_rate, beta

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns the weighted mean of the adjusted updates, with weights that this round has a say in."""
        losses, updates = nonnegative_losses(cohort, "FedPW"), cohort.updates
        require_finite(updates.norms().isfinite(), cohort, "FedPW")
        if stands_still(cohort):
            self.report = StepReport(weights=torch.full_like(losses, 1 / len(cohort)), flagged=True)
            return torch.zeros_like(cohort.params)
        first, ids = not self.q, cohort.client_ids
        along = updates.gram().sum((0, 2)).cpu()  # products with the sum of all updates
        agreement, fairness = max(float(along.mean()), 0.0), float(losses.mean())
        self.p_first, self.q_first = self.p_first or agreement, self.q_first or fairness
        p = self._follow(self.p, self.p_gains, ids, along.clamp_min(0), agreement, self.p_first)  # equation 9
        q = self._follow(self.q, self.q_gains, ids, losses, fairness, self.q_first)  # equation 10
        early, late = (float(weights.std(correction=0)) for weights in (p, q))
        fair = late / (early + late) if early + late > 0 else 0.5
        weights = (1 - fair) * p + fair * q  # equation 11
        self.report = StepReport(weights=weights, scalars={"fair_share": fair})
        if first or len(cohort) == 1 or self.drop_rate == 0:
            return weighted_mean(cohort, weights)
        return self._adjusted(updates, weights, losses)

    def _follow(
        self,
        weights: PerClient[float],
        gains: PerClient[float],
        clients: Sequence[int],
        quantity: Tensor,
        mean: float,
        first: float,
    ) -> Tensor:
        """Weights ``[m]`` of a round's clients, summing to 1: ``g <- (1 - b) g + b share``, ``w <- (w + g) / sum``.

        They follow shares of a quantity ``[m]``, the more slowly the smaller its mean (0 if negative) has become beside
        the first one that was positive.
        """
        rate = min(self.beta * mean / first, 1.0) if first > 0 else 0.0
        started, typical = bool(weights), sum(weights.values()) / len(weights) if weights else 0.0
        before = weights.vector(clients, typical)
        after = (1 - rate) * gains.vector(clients, 0.0) + rate * shares(quantity)
        result = shares(before + after)
        weights.put(clients, result * (before.sum() if started else 1.0))
        gains.put(clients, after)
        return result

    def _adjusted(self, updates: UpdateMatrix, weights: Tensor, losses: Tensor) -> Tensor:
        """Equations 5 to 7: the mean ``[n]`` of updates without their small numbers, larger where clients agree."""
        rows, m, sizes = updates.rows, len(updates), torch.tensor(updates.layout.layer_starts).diff()
        relative = (losses / losses.max()).clamp_min(LEAST) if bool(losses.any()) else torch.ones_like(losses)
        rates = (shares(1 / relative) * m * self.drop_rate).clamp_max(1)  # r_k
        sought = (rates[:, None] * sizes).long()
        small = _smallest(rows.abs(), sought, updates)
        left_out = _mean_sizes(small, rows, updates)
        large = rows.masked_fill(small, 0)
        step = updates.beside(large).combine(weights)

        agreement = _agreement(large, updates)
        among = (self.drop_rate * sizes).long()
        agreed = ~_smallest(agreement[None], (sizes - among)[None], updates)
        size = _mean_sizes(agreed, step[None], updates)[:, 0]
        mean = torch.where((sought > 0).all(0), left_out.mean(1), torch.nan)  # no client may leave out nothing
        growth = torch.where((size > 0) & (mean < size), mean / size, 0.0)  # alpha
        factors = (1 + growth).repeat_interleave(updates.offsets.diff()).to(step)
        return torch.where(agreed[0], step * factors, step)

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes of the adjusted updates of a round, their sizes, and marks."""
        width = max(federation.dtype.itemsize, 4)
        return {"adjusted updates": cohort_size * federation.numel * (federation.dtype.itemsize + width + 1)}


def _smallest(values: Tensor, counts: Tensor, updates: UpdateMatrix) -> Tensor:
    wide = values if values.dtype.itemsize >= 4 else values.float()
    return smallest(wide, counts.to(values.device), updates.columns, updates.layout.layer_starts)


def _mean_sizes(marked: Tensor, rows: Tensor, updates: UpdateMatrix) -> Tensor:
    """Mean sizes ``[L, k]`` of the marked numbers of rows, per tensor, on the CPU; NaN where none is marked."""
    ones = torch.ones_like(rows[0])
    sizes = updates.beside(rows.abs().masked_fill_(~marked, 0)).dots(ones)
    return sizes.cpu() / updates.beside(marked.to(rows.dtype)).dots(ones).cpu()


def _agreement(rows: Tensor, updates: UpdateMatrix) -> Tensor:
    """``[n]`` square of the sum of each column over its sum of squares, of rows whose tensors have length 1.

    The standard deviation of a column that is divided by its length falls as this grows. A column of zeros has 0.
    """
    squares = updates.beside(rows).squares()
    scale = torch.where(squares > 0, squares.rsqrt(), 0.0).to(rows.device)  # [L, m]
    lengths = updates.offsets.diff().to(rows.device)
    wide = torch.float32 if rows.device.type == "mps" else torch.float64
    total, square = (torch.zeros(rows.shape[1], dtype=wide, device=rows.device) for _ in range(2))
    for row, factors in zip(rows, scale.T, strict=True):
        unit = row.to(wide) * factors.to(wide).repeat_interleave(lengths)
        total += unit
        square += unit.square()
    return torch.where(square > 0, total.square() / square, 0.0)


def smallest(values: Tensor, counts: Tensor, columns: Columns, starts: tuple[int, ...]) -> Tensor:
    """Marks ``[k, n]`` the smallest numbers of every row in every segment, and all that equal the largest of these.

    ``values [k, n]`` are not negative and not NaN, float32 or float64, with the columns of this shard. Int64 beside
    them, ``counts [k, L]`` say how many to mark, up to all. ``starts`` are ``L + 1`` numbers that rise from 0 to the
    number of all columns.
    """
    segments = list(pairwise(columns.offsets(starts).tolist()))
    parts = [values[:, a:b] for a, b in segments]
    if len(columns.borders) > 2:
        bounds = _bounds_of_shards(values, counts, columns, starts)
    else:
        bounds = torch.stack([_bounds(part, k) for part, k in zip(parts, counts.T.tolist(), strict=True)], 1)
    return torch.cat([part <= bound[:, None] for part, bound in zip(parts, bounds.T, strict=True)], 1)


def _bounds(values: Tensor, counts: list[int]) -> Tensor:
    """``[k]`` the largest of each row's smallest numbers; -1 where these are none."""
    none = values.new_full((), -1.0)
    found = [row.kthvalue(count).values if count else none for row, count in zip(values, counts, strict=True)]
    return torch.stack(found)


def _bounds_of_shards(values: Tensor, counts: Tensor, columns: Columns, starts: tuple[int, ...]) -> Tensor:
    """The same, ``[k, L]``, by bisection: shards exchange how many of their numbers lie below.

    The bits of floating-point numbers have the order of the numbers, where none is negative.
    """
    kind, infinity = (torch.int32, 0x7F800000) if values.dtype == torch.float32 else (torch.int64, 0x7FF0000000000000)
    bits = values.view(kind)
    low, high = torch.full_like(counts, -1), torch.full_like(counts, infinity)
    while bool((low < high).any()):
        middle = low + (high - low) // 2  # a sum of both could overflow
        bounds = middle.T.to(kind)[:, :, None]

        def part(at: slice, offsets: Tensor, bounds: Tensor = bounds) -> Tensor:
            segments = pairwise(offsets.tolist())
            return torch.stack([(bits[:, at][:, a:b] <= bounds[i]).sum(1) for i, (a, b) in enumerate(segments)])

        enough = counts <= columns.sum(starts, part).T
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    return torch.where(counts > 0, high.to(kind).view(values.dtype), -1.0)
