# SPDX-License-Identifier: Apache-2.0
"""Steps that are combinations of rows, decided on the rows' inner products.

A combination ``d = V^T c`` of the rows of ``V`` is known by its coefficients ``c``. Everything about it follows from
the Gram matrix ``K = V V^T``: ``V d = K c`` and ``||d||^2 = c^T K c``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import StepReport
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.row_history import RowHistory
from fl_lightning.ops.live_rows import live_rows as live_rows_beside
from fl_lightning.ops.live_rows import row_norms

ZERO_ROW = 1e-8  # a row this much shorter than the median online one counts as zero
ZERO_DIRECTION = 1e-4  # a direction this much shorter than the rows counts as zero
SHORT_DIRECTION = 1e-2  # one this much shorter than the mean row is flagged: it leaves out nearly all that rows share


def live_rows(norms: Tensor, online: int) -> Tensor:
    """Which rows count, by their lengths ``[..., k]``: those that are not zero beside the median online one."""
    return live_rows_beside(norms, online, ZERO_ROW)


def length(coeff: Tensor, gram: Tensor) -> Tensor:
    """Length of the combination with coefficients ``[k]``, from ``[k, k]``."""
    return (coeff @ gram @ coeff).clamp_min(0).sqrt()


class Rescaled(NamedTuple):
    """Coefficients ``[L, k]`` of a direction at its final length, and what it was before beside the mean row.

    ``noted`` is a number that the rule wants to report of it.
    """

    coeff: Tensor
    ratio: Tensor
    noted: Tensor | float = 0.0


def as_long_as_mean(coeff: Tensor, gram: Tensor, online: int) -> Rescaled:
    """Rescales coefficients ``[L, k]`` so that the whole step is as long as the mean of the online rows."""
    size = (coeff * (gram @ coeff[:, :, None])[:, :, 0]).sum().clamp_min(0).sqrt()
    target = gram[:, :online, :online].mean((1, 2)).sum().clamp_min(0).sqrt()
    return Rescaled(coeff * torch.where(size > 0, target / size, 0.0), torch.where(target > 0, size / target, 0.0))


def rounding_error(cohort: Cohort) -> float:
    """Relative error to expect in products of rows and in the step; half precision is not held to its own."""
    return min(torch.finfo(cohort.updates.dtype).eps, torch.finfo(torch.float32).eps)


def require_finite(finite: Tensor, cohort: Cohort, method: str = "") -> None:
    """Refuses rows with NaN or infinity.

    Args:
        finite: ``[m]`` whether each client's rows are finite.
        cohort: the cohort.
        method: whose error it is.

    Raises:
        ValueError: names the clients.
    """
    clients = [client for client, fine in zip(cohort.client_ids, finite.tolist(), strict=True) if not fine]
    if clients:
        rule = f" for {method}" if method else ""
        raise ValueError(f"updates must be finite{rule}, found NaN or infinity in the rows of clients {clients}")


def no_step(rule: ServerRule, cohort: Cohort, **scalars: float) -> Tensor:
    """The step 0 ``[n]``, which the rule's report flags."""
    rule.report = StepReport(weights=torch.zeros(len(cohort), dtype=torch.float64), flagged=True, scalars=scalars)
    return torch.zeros_like(cohort.params)


class Decision(NamedTuple):
    """A step, and how it came about, on the CPU.

    Attributes:
        step: ``[n]``.
        coeff: ``[L, k]`` its coefficients.
        slopes: ``[L, m]`` its products with the online rows.
        ratio: length of its direction before it was rescaled, beside that of the mean row.
        noted: as in :class:`Rescaled`.
    """

    step: Tensor
    coeff: Tensor
    slopes: Tensor
    ratio: float
    noted: float


class JointRows:
    """The rows of a round's ``m`` clients, followed by those of ``h`` clients that are remembered.

    Args:
        cohort: the round's clients.
        method: the rule's name, for errors.
        history: the remembered rows.
        absent: the remembered clients to count.

    Attributes:
        gram: ``[L, m + h, m + h]`` Gram matrices of the layers, beside the rows.
    """

    def __init__(
        self, cohort: Cohort, method: str, history: RowHistory | None = None, absent: Sequence[int] = ()
    ) -> None:
        self.cohort, self.method, self.absent = cohort, method, absent
        self._history = RowHistory() if history is None else history
        self.gram = self._history.joint_gram(cohort.updates, absent, cohort.client_ids)

    def on_cpu(self) -> Tensor:
        """The Gram matrices on the CPU.

        Raises:
            ValueError: a row of the round is not finite.
        """
        gram = self.gram.cpu()
        require_finite(gram.diagonal(dim1=-2, dim2=-1).isfinite().all(0)[: len(self.cohort)], self.cohort, self.method)
        return gram

    def combine(self, coeff: Tensor) -> Tensor:
        """The combination ``[n]`` with coefficients ``[L, m + h]``, or ``[m + h]`` for all layers alike."""
        if coeff.dim() == 1:
            coeff = coeff.expand(len(self.gram), -1)
        return self._history.combine(self.cohort.updates, coeff, self.absent)

    def decide(self, found: Rescaled, sure: Tensor, again: Callable[[Tensor], Rescaled]) -> Decision | None:
        """The combination with the coefficients found or, if they do not hold, with others that are found on the CPU.

        A device is asked once, and it has the step queued by then. So it waits for an answer only where one of the
        degenerate cases occurs that it cannot decide on its own.

        Args:
            found: coefficients ``[L, m + h]`` beside the Gram matrices.
            sure: whether they hold, given that all rows are finite and not all online ones zero.
            again: finds coefficients from the Gram matrices on the CPU.

        Returns:
            The step; ``None`` if all online rows are zero.

        Raises:
            ValueError: a row of the round is not finite.
        """
        (coeff, ratio, noted), m, norms = found, len(self.cohort), row_norms(self.gram)
        sure = sure & norms.isfinite().all() & norms[:, :m].any()
        slopes = (self.gram @ coeff[:, :, None])[:, :m, 0]
        step = None if self.gram.is_cpu else self.combine(coeff)
        noted = noted if isinstance(noted, Tensor) else torch.full_like(ratio, noted)
        parts = [sure.to(coeff)[None], ratio[None], coeff.flatten(), slopes.flatten(), noted.to(coeff)[None]]
        seen = torch.split(torch.cat(parts).cpu(), [len(part) for part in parts])  # the only look
        if bool(seen[0]):
            coeff, slopes = seen[2].view(coeff.shape), seen[3].view(slopes.shape)
            step = self.combine(coeff) if step is None else step
            return Decision(step, coeff, slopes, float(seen[1]), float(seen[4]))
        gram = self.on_cpu()
        if not bool(row_norms(gram)[:, :m].any()):
            return None
        coeff, ratio, noted = again(gram)
        slopes = (gram @ coeff[:, :, None])[:, :m, 0]
        return Decision(self.combine(coeff), coeff, slopes, float(ratio), float(noted))
