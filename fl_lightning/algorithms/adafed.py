# SPDX-License-Identifier: Apache-2.0
"""AdaFed: Fair Federated Learning via Adaptive Common Descent Direction.

Shayan Mohajer Hamidi, En-Hui Yang. Transactions on Machine Learning Research, 2024. https://arxiv.org/abs/2401.04993
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.rows import ZERO_DIRECTION, JointRows, length, live_rows, no_step
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Needs, StepReport
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.ops.rows import row_norms

DEPENDENT = 1e-10  # an update is a combination of others if this share of its square at most is not theirs


class AdaFed(ServerRule):
    """The direction along which every client's loss falls in proportion to a power of that loss.

    The updates are made orthogonal by Gram-Schmidt, in which each is divided by the power ``phi_k = |f_k|^gamma`` of
    its client's loss (equations 5 and 6). The step is the shortest vector of the convex hull of what results, which is
    known in closed form (equations 12 to 14). With independent updates, ``u_k . d = phi_k ||d||^2`` for every client:
    nobody conflicts with the step, and whoever has the larger loss gains more. The order of the clients does not
    matter then. The step is at most as long as any update divided by its ``phi_k``: where clients take few steps and
    many, those with few make it short.

    Degenerate cases. A client whose update is a combination of those of clients with larger losses has no say, nor has
    one whose update is 1e-8 times shorter than the median. A direction 1e-4 times shorter than the rows counts as zero:
    there is no step, and the report is flagged. That happens where clients with nearly the same update have different
    losses. A client with loss 0 is promised that its loss stays as it is.

    Args:
        gamma: how much larger losses count, not negative; 0: all alike.
        unit: of the losses. ``"largest"``: that of the round. The step is then at most as long as the update of the
            client with this loss, and does not depend on the scale of losses. ``"one"``: losses count as they are, as
            the paper has it. Steps become longer as losses fall.

    Raises:
        ValueError: an argument is out of range.
    """

    needs = Needs(losses=True)
    reads = "gram"

    @checked(gamma=Bounds(0))
    def __init__(self, gamma: float = 1.0, unit: Literal["largest", "one"] = "largest") -> None:
        self.gamma = gamma
        self.unit = unit

    def aggregate(self, cohort: Cohort) -> Tensor:
        """See the class."""
        losses = cohort.known_losses.abs()
        rows = JointRows(cohort, "AdaFed")
        gram = rows.on_cpu(rows.gram.sum(0))  # K [m, m]
        norms = row_norms(gram)
        live = live_rows(norms, len(cohort))
        largest = float(torch.where(live, losses, 0.0).max())
        if largest == 0:  # as if all losses were 1
            losses, largest = torch.ones_like(losses), 1.0
        phi = (losses / (largest if self.unit == "largest" else 1.0)) ** self.gamma
        order = [k for k in losses.argsort(descending=True, stable=True).tolist() if live[k]]
        vectors, squares, scales = _orthogonal(gram, phi, order)
        weights = (scales / squares) @ vectors / (scales**2 / squares).sum()  # equations 12 to 14
        if not bool(length(weights, gram) > ZERO_DIRECTION * norms.mean()):
            return no_step(self, cohort, dependent=float(len(cohort) - len(squares)))
        self.report = StepReport(weights=weights, scalars={"dependent": float(len(cohort) - len(squares))})
        return rows.combine(weights)


def _orthogonal(gram: Tensor, phi: Tensor, order: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Gram-Schmidt in this order on rows that are known by their inner products ``[m, m]``.

    The paper's orthogonal updates are ``v_k / s_k`` of what is returned. Nothing is divided by ``s_k``, which may be 0.
    Of each row that is no combination of those before it, returns coefficients ``[r, m]`` of ``v``, squares ``||v||^2``
    ``[r]`` and divisors ``s`` ``[r]``.
    """
    vectors, products = gram.new_zeros(len(gram), len(gram)), torch.zeros_like(gram)
    squares, scales, r = torch.ones_like(phi), torch.zeros_like(phi), 0
    for k in order:
        shares = products[:r, k] / squares[:r]  # u_k . v_i / ||v_i||^2
        v = -(shares @ vectors[:r])
        v[k] += 1  # numerator of equation 6
        product = gram @ v
        square = v @ product
        if square > DEPENDENT * gram[k, k]:
            vectors[r], products[r], squares[r] = v, product, square
            scales[r] = phi[k] - shares @ scales[:r]  # its denominator
            r += 1
    return vectors[:r], squares[:r], scales[:r]
