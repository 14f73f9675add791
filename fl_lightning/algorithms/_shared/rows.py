# SPDX-License-Identifier: Apache-2.0
"""Steps that are combinations of rows, decided on the rows' inner products.

A combination ``d = V^T c`` of the rows of ``V`` is known by its coefficients ``c``. Everything about it follows from
the Gram matrix ``K = V V^T``: ``V d = K c`` and ``||d||^2 = c^T K c``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning import ops
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Federation, Reads, StepReport
from fl_lightning.arguments import check_unused
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.row_history import RowHistory, row_history
from fl_lightning.ops.rows import live_rows as live_rows_beside

ZERO_ROW = 1e-8  # a row this much shorter than the median online one counts as zero
ZERO_DIRECTION = 1e-4  # a direction this much shorter than the rows counts as zero
SHORT_DIRECTION = 1e-2  # one this much shorter than the mean row is flagged: it leaves out nearly all that rows share
EQUAL_LOSSES = 1e-6  # radians between losses and (1, ..., 1) below which no client is behind
HISTORY_LIMIT = 8 * 2**30
"""Bytes of rows and products that a rule takes without being told how many rows to remember."""


def live_rows(norms: Tensor, online: int) -> Tensor:
    """Which rows count, by their lengths ``[..., k]``: those that are not zero beside the median online one."""
    return live_rows_beside(norms, online, ZERO_ROW)


def length(coeff: Tensor, gram: Tensor) -> Tensor:
    """Length of the combination with coefficients ``[k]``, from ``[k, k]``."""
    return (coeff @ gram @ coeff).clamp_min(0).sqrt()


def products(gram: Tensor, coeff: Tensor) -> Tensor:
    """Products ``[L, k]`` of all rows with the combinations with coefficients ``[L, k]``, from ``[L, k, k]``."""
    return torch.bmm(gram, coeff[:, :, None])[:, :, 0]


def mean_squares(gram: Tensor, online: int) -> Tensor:
    """Squared lengths ``[L]`` of the mean of the online rows, from ``[L, k, k]``."""
    return gram[:, :online, :online].mean((1, 2))


class Rescaled(NamedTuple):
    """A direction at its final length."""

    coeff: Tensor  # [L, k]
    factor: float  # what it was multiplied by
    ratio: float  # how long it was before, beside the mean row


def lengths(coeff: Tensor, slopes: Tensor, squares: Tensor) -> Tensor:
    """Lengths ``[2]`` of a direction over all layers, and of the mean of the online rows.

    It is known by its coefficients ``[L, k]``, its :func:`products` ``[L, k]``, and :func:`mean_squares` ``[L]``.
    """
    return torch.stack(((coeff * slopes).sum(), squares.sum())).clamp_min(0).sqrt()


def as_long_as_mean(coeff: Tensor, slopes: Tensor, squares: Tensor) -> Rescaled:
    """Rescales a direction so that the whole step is as long as the mean of the online rows; see :func:`lengths`."""
    size, target = lengths(coeff, slopes, squares).tolist()
    factor = target / size if size > 0 else 0.0
    return Rescaled(coeff * factor, factor, size / target if target > 0 else 0.0)


def rounding_error(cohort: Cohort) -> float:
    """Relative error to expect in products of rows and in the step; half precision is not held to its own."""
    return min(torch.finfo(cohort.updates.dtype).eps, torch.finfo(torch.float32).eps)


def require_finite(finite: Tensor, cohort: Cohort, method: str = "") -> None:
    """Refuses rows with NaN or infinity, and names their clients; ``finite`` ``[m]`` says whose rows are fine."""
    clients = [client for client, fine in zip(cohort.client_ids, finite.tolist(), strict=True) if not fine]
    if clients:
        rule = f" for {method}" if method else ""
        raise ValueError(f"updates must be finite{rule}, found NaN or infinity in the rows of clients {clients}")


def no_step(rule: ServerRule, cohort: Cohort, **scalars: float) -> Tensor:
    """The step 0 ``[n]``, which the rule's report flags."""
    rule.report = StepReport(weights=torch.zeros(len(cohort), dtype=torch.float64), flagged=True, scalars=scalars)
    return torch.zeros_like(cohort.params)


# ---- the fair-driven weights and the common descent direction of FedMDFG and FedLF


def loss_angle(losses: Tensor) -> float:
    """Angle in radians between a loss vector and ``(1, ..., 1)``; 0 where all losses are 0."""
    mean = losses.mean()
    # tan(angle) = deviation / mean keeps its digits where arccos of a cosine near 1 loses them.
    return math.atan2(float((losses - mean).norm()), float(mean) * math.sqrt(len(losses)))


def fair_weights(losses: Tensor, cosine: bool = False, equal: float = EQUAL_LOSSES) -> Tensor | None:
    """Weights ``[m]`` of the fair-driven objective: positive for clients whose loss must fall faster.

    They are of unit length (``h``: FedMDFG, Algorithm 1, line 14). With ``cosine`` they are the gradient of
    ``-cos(1, F)`` (FedLF, equation 5), which is ``sin(angle(F, 1)) / ||F||`` long. ``None`` where the direction is
    undefined: one client, losses all 0, or equal up to an angle ``equal`` in radians between them and ``(1, ..., 1)``.
    """
    m, total, squares = len(losses), float(losses.sum()), float(losses.square().sum())
    deviation = float((losses - total / m).norm())
    if not deviation > math.tan(equal) / math.sqrt(m) * abs(total):
        return None
    h = total / squares * losses - 1
    weights: Tensor = h / h.norm() * (deviation / squares if cosine else 1.0)
    return weights


class Directions(NamedTuple):
    """Directions of ``B`` layers or blocks of layers."""

    coeff: Tensor  # [B, m + h]
    solved: Tensor  # [B] whether they are not zero, and fall for every online row
    fair: Tensor  # [B] whether the hull had the fair row


def common_descent(
    gram: Tensor, cohort: Cohort, weights: Tensor | None = None, scale: Tensor | None = None
) -> Directions:
    """Shortest vectors in the convex hulls of rows and a fair row (MGDA), see :func:`fl_lightning.ops.common_descent`.

    From ``gram [B, m + h, m + h]``, weights ``[m]`` of the fair row (``None``, or zeros, leave it out) and factors
    ``scale [B, m + h]`` of the rows, of which 0 leaves one out; ``None``: rows of equal length.
    """
    rounding = rounding_error(cohort)
    return Directions(
        *ops.common_descent(
            gram, len(cohort), scale, weights, zero_row=ZERO_ROW, zero_direction=ZERO_DIRECTION, rounding=rounding
        )
    )


# ---- the rows of a round, and the last rows of clients, which count while these are absent


class Seen(NamedTuple):
    """What is known of a direction, on the CPU."""

    coeff: Tensor  # [L, k]
    slopes: Tensor  # [L, k] products with the rows
    squares: Tensor  # [L] squared lengths of the mean of the online rows
    solved: Tensor  # [L] whether it holds in a layer; numbers, if they come from a device
    fair: Tensor  # [L] whether a fair row took part, likewise
    step: Tensor | None = None  # [n] the direction as long as the mean row, if a device works on it already


class JointRows:
    """The rows of a round's ``m`` clients, followed by those of ``h`` clients that are remembered and absent."""

    def __init__(
        self, cohort: Cohort, method: str, history: RowHistory | None = None, absent: Sequence[int] = ()
    ) -> None:
        self.cohort, self.method, self.absent = cohort, method, absent
        self._history = RowHistory() if history is None else history
        self.gram = self._history.joint_gram(cohort.updates, absent, cohort.client_ids)

    def on_cpu(self, gram: Tensor) -> Tensor:
        """Gram matrices ``[..., m + h, m + h]`` on the CPU: those of the layers, or their sum."""
        gram = gram.cpu()
        finite = gram.diagonal(dim1=-2, dim2=-1).isfinite().reshape(-1, gram.shape[-1]).all(0)
        require_finite(finite[: len(self.cohort)], self.cohort, self.method)
        return gram

    def combine(self, coeff: Tensor) -> Tensor:
        """The combination ``[n]`` with coefficients ``[L, m + h]``, or ``[m + h]`` for all layers alike."""
        if coeff.dim() == 1 and self.absent:
            coeff = coeff.expand(len(self.gram), -1)
        return self._history.combine(self.cohort.updates, coeff, self.absent)

    def look(self, coeff: Tensor, solved: Tensor, fair: Tensor) -> Seen:
        """Brings a direction, found beside the Gram matrices, to the CPU with what there is to know about it.

        A device is asked once, for a few numbers of each layer. Before the CPU waits for them, it queues the step that
        follows if the direction holds in every layer.
        """
        gram = self.gram
        slopes, squares = products(gram, coeff), mean_squares(gram, len(self.cohort))
        if not gram.is_cpu:
            # Of one dtype, for which a device has one launch.
            flags = torch.stack((solved, fair), 1).to(coeff.dtype)
            there = torch.cat((coeff, slopes, squares[:, None], flags), 1).to("cpu", non_blocking=True)
            arrived = torch.accelerator.current_stream(gram.device).record_event()
            size, target = lengths(coeff, slopes, squares)
            step = self.combine(coeff * (target / size))
            arrived.synchronize()
            coeff, slopes, each = torch.split(there, [coeff.shape[1], coeff.shape[1], 3], 1)
            squares, solved, fair = each.T.contiguous()
            return Seen(coeff, slopes, squares, solved, fair, step)
        return Seen(coeff, slopes, squares, solved, fair)


class RemembersRows(ServerRule):
    """A server rule that remembers clients' rows for ``window`` rounds (``None``: all); ``history`` has them.

    At most ``max_history`` are remembered, oldest dropped first; ``None``: one for every client seen, if that is no
    more than 8 GiB. They live on ``history_device``; ``None``: beside the updates.
    """

    history = row_history(capacity="max_history", reserve="reserved_rows", device="history_device")

    def __init__(self, window: int | None, max_history: int | None = None, history_device: str | None = None) -> None:
        if window == 0:
            for name, value in (("max_history", max_history), ("history_device", history_device)):
                check_unused(f"{name} of {type(self).__name__}", value, None, "where no rows are remembered")
        self.window, self.max_history, self.history_device = window, max_history, history_device
        self.reserved_rows = 0  # at most, in this fit

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        """Inner products, and rows where some are kept for rounds in which their clients are absent."""
        return "gram" if self.window == 0 else "rows"

    def begin_fit(self, federation: Federation) -> None:
        """Plans no more rows than there are clients, and than rounds bring."""
        layers = federation.layout.num_layers
        clients = len({*range(federation.num_clients), *self.history.select()})  # some may be gone
        cohort, most = federation.cohort_size, self.max_history or clients
        rounds = [each for each in (self.window, federation.rounds) if each is not None]
        rows = min([clients, *(each * (cohort or clients) for each in rounds)])
        size = RowHistory.max_nbytes(rows, federation.numel, layers, federation.dtype)
        if self.max_history is None and rows > (cohort or 0) and size > HISTORY_LIMIT:
            name, fitting = type(self).__name__, _fitting(federation.numel * federation.dtype.itemsize, layers)
            raise ValueError(
                f"{name}(max_history=None) would remember the rows of {rows:,} clients of {clients:,} and their "
                f"products, up to {size:,} B, more than the 8 GiB that it takes unasked: write "
                f"{name}(max_history={fitting}), which fits, or max_history={rows} for all of them"
            )
        self.history.capacity, self.history.reserve = min(most, clients), min(most, rows)
        self.reserved_rows = self.history.reserve

    def joint_rows(self, cohort: Cohort, since: float | None = None) -> JointRows:
        """The round's rows, followed by those of absent clients that were last online in round ``since`` or later."""
        absent = self.history.select(exclude=set(cohort.client_ids), since=since)
        absent = [client for client in absent if client < (cohort.num_clients or math.inf)]
        return JointRows(cohort, type(self).__name__, self.history, absent)

    def remember(self, cohort: Cohort, scales: Tensor | float = 1.0, live: Tensor | None = None) -> None:
        """Keeps the round's rows, once its step has been computed, and drops rows that are past the window.

        Args:
            cohort: the round's clients.
            scales: ``[m]`` or a number: factors of the rows from now on.
            live: ``[m]`` clients whose rows to keep; ``None``: all.
        """
        if self.window == 0:
            return
        if self.window is not None:
            self.history.forget(before=cohort.round + 1 - self.window)
        places = range(len(cohort)) if live is None else live.nonzero().flatten().tolist()
        clients = {place: cohort.client_ids[place] for place in places}
        self.history.remember(cohort.updates, clients, cohort.round, scales)


def _fitting(row: int, layers: int) -> int:
    """How many rows of ``row`` bytes fit into the limit with products of ``8 layers`` bytes a pair, to two digits."""
    pair = 8 * layers
    number = (math.isqrt(row * row + 4 * pair * HISTORY_LIMIT) - row) // (2 * pair)
    digits = int(10 ** max(len(str(number)) - 2, 0))
    return max(number // digits * digits, 1)
