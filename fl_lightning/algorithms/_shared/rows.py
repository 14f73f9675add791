# SPDX-License-Identifier: Apache-2.0
"""Steps that are combinations of rows, decided on the rows' inner products.

A combination ``d = V^T c`` of the rows of ``V`` is known by its coefficients ``c``. Everything about it follows from
the Gram matrix ``K = V V^T``: ``V d = K c`` and ``||d||^2 = c^T K c``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import StepReport
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.row_history import RowHistory
from fl_lightning.ops.live_rows import live_rows as live_rows_beside

ZERO_ROW = 1e-8  # a row this much shorter than the median online one counts as zero
ZERO_DIRECTION = 1e-4  # a direction this much shorter than the rows counts as zero
SHORT_DIRECTION = 1e-2  # one this much shorter than the mean row is flagged: it leaves out nearly all that rows share


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
