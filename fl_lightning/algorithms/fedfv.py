# SPDX-License-Identifier: Apache-2.0
"""FedFV: Federated Learning with Fair Averaging.

Zheng Wang, Xiaoliang Fan, Jianzhong Qi, Chenglu Wen, Cheng Wang, Rongshan Yu. IJCAI 2021.
https://github.com/WwZzz/easyFL
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fl_lightning import ops
from fl_lightning.algorithms._shared.common_descent import (
    ZERO_DIRECTION,
    ZERO_ROW,
    check_rows,
    rounding_error,
    row_norms,
)
from fl_lightning.algorithms.base import Federation, Needs, ServerRule, State, StepReport
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.row_history import RowHistory


class FedFV(ServerRule):
    """The mean of updates that were first projected off the updates they conflict with (Algorithm 1).

    Internal conflicts (Algorithm 2): each update is projected off the others that it conflicts with, one after the
    other, those of the largest losses last. Clients with the largest losses keep their updates as they are. External
    conflicts (section 3.3): the mean is projected off the last updates of clients that were online in the ``tau``
    rounds before and are absent now, summed per round, from the oldest round to the newest. The result is as long as
    the mean of the updates as they came.

    The step may still conflict with a client, also with the one projected on last: that client's own projections can
    turn it against itself. The paper's remark on Theorem 1 does not hold in general.

    Degenerate cases. Nobody is projected off a row that is 1e-8 times shorter than the longest online one. A mean that
    is 1e-4 times shorter than the rows counts as zero: it is not rescaled, the step is zero and flagged. If all rows
    are zero, the step is zero too, flagged, and nothing is remembered. Of clients with equal losses the one that
    reported first is projected on first.

    Args:
        alpha: share of the clients that keep their updates, in [0, 1].
        tau: rounds that an absent client counts for; 0 ignores absent clients.
        external_window: ``"absent"`` for rounds ``t - tau`` to ``t - 1`` (the paper), ``"reference"`` for
            ``t - tau + 1`` to ``t`` (the authors' later code): the round's own clients and those absent for less than
            ``tau`` rounds.
        keep_rule: how many keep theirs, of ``m``: ``"ceil"`` for ``m - ceil((m - 1) (1 - alpha))``, at least one if
            ``alpha`` is positive (the authors' code); ``"round"`` for ``alpha m``, rounded (the paper).
        eps: added to the squared norms and to the norm that are divided by, in the updates' unit. Above 0, conflicts
            remain, and scaling the updates changes the direction.
        max_history: most rows to remember, oldest dropped first; ``None``: all within ``tau`` rounds.
        history_device: where remembered rows live, for instance ``"cpu"``; ``None``: beside the updates.

    Raises:
        ValueError: an argument is out of range.
    """

    needs = Needs(losses=True)

    def __init__(
        self,
        alpha: float = 0.1,
        tau: int = 1,
        external_window: Literal["absent", "reference"] = "absent",
        keep_rule: Literal["ceil", "round"] = "ceil",
        eps: float = 0.0,
        max_history: int | None = None,
        history_device: str | None = None,
    ) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha of FedFV must lie between 0 and 1, found {alpha}")
        if tau < 0:
            raise ValueError(f"tau of FedFV must not be negative, found {tau}")
        if not 0 <= eps < math.inf:
            raise ValueError(f"eps of FedFV must be finite and not negative, found {eps}")
        self.alpha = alpha
        self.tau = tau
        self.external_window = external_window
        self.keep_rule = keep_rule
        self.eps = eps
        self.max_history = max_history
        self.history = RowHistory(max_history, history_device)

    def begin_fit(self, federation: Federation) -> None:
        """Never allocates more rows than there are clients."""
        self.history.capacity = min(self.max_history or federation.num_clients, federation.num_clients)

    def aggregate(self, cohort: Cohort) -> Tensor:
        """See the class.

        Raises:
            ValueError: the cohort has no losses, or a row is not finite.
        """
        m, t, losses = len(cohort), cohort.round, cohort.known_losses.cpu()
        reference = self.external_window == "reference"
        outside = 0 < self.tau <= t
        since = t - self.tau + reference
        absent = self.history.select(exclude=set(cohort.client_ids), since=since) if outside else []
        gram = self.history.joint_gram(cohort.updates, absent, cohort.client_ids).cpu()
        check_rows(gram, cohort, "FedFV")
        gram = gram.sum(0)  # K [m + h, m + h]
        longest = row_norms(gram)[:m].max()
        if longest == 0:
            self.report = StepReport(weights=torch.zeros(m, dtype=torch.float64), flagged=True)
            return torch.zeros_like(cohort.params)

        live = row_norms(gram) > ZERO_ROW * longest
        gram *= torch.outer(live, live)
        c = torch.zeros(len(gram), dtype=torch.float64)
        c[:m] = self._internal(gram[:m, :m], losses)
        found = 0
        if outside:
            rounds = torch.tensor([t if reference else -1] * m + self.history.rounds(absent))
            found = self._external(gram, c, rounds, rounding_error(cohort))
        length = (c @ gram @ c).clamp_min(0).sqrt()  # ||g^t||
        moves = length > ZERO_DIRECTION * gram.diagonal()[:m].mean().sqrt()
        target = gram[:m, :m].mean().clamp_min(0).sqrt()  # ||1/m sum_k g_k^t||, rows as they came
        c *= target / (length + self.eps) if moves else 0.0  # line 10
        step = self.history.combine(cohort.updates, c.expand(cohort.updates.layout.num_layers, -1), absent)

        self._remember(cohort)
        scalars = {"history_rows": float(len(absent)), "external_conflicts": float(found)}
        self.report = StepReport(weights=c[:m].clone(), flagged=not bool(moves), scalars=scalars)
        return step

    def _internal(self, gram: Tensor, losses: Tensor) -> Tensor:
        """Coefficients ``[m]`` of the mean of the projected rows (Algorithm 2)."""
        m = len(losses)
        order = losses.argsort(stable=True)  # PO^t: the largest loss is projected on last
        keep = torch.zeros(m, dtype=torch.bool)
        keep[order[m - self._kept(m) :]] = True
        # Only squared norms that are divided by come from the diagonal.
        divided = gram + self.eps * torch.eye(m, dtype=torch.float64)
        return ops.project_conflicts(divided[None], order, keep)[0].mean(0)

    def _kept(self, m: int) -> int:
        """How many of ``m`` clients keep their updates, in floating point as published: 3 of 10 for a third."""
        if self.keep_rule == "round":
            return math.floor(self.alpha * m + 0.5)
        return m - math.ceil((m - 1) * (1 - self.alpha)) if self.alpha > 0 else 0

    def _external(self, gram: Tensor, c: Tensor, rounds: Tensor, rounding: float) -> int:
        """Projects ``c`` in place off the rows that it conflicts with, round by round (Algorithm 3).

        Args:
            gram: ``[k, k]``.
            c: ``[k]``.
            rounds: ``[k]`` round of each row; -1 leaves it out.
            rounding: relative error of products; what it can make negative is no conflict.

        Returns:
            How many rows conflicted.
        """
        found, norms = 0, row_norms(gram)
        for k in sorted({k for k in rounds.tolist() if k >= 0}):
            slopes = gram @ c
            noise = rounding * norms * (c.abs() @ norms)
            conflicting = ((rounds == k) & (slopes < -noise)).double()
            size = conflicting @ gram @ conflicting
            if size > (ZERO_ROW * norms.max()) ** 2:
                c -= (conflicting @ slopes) / (size + self.eps) * conflicting
                found += int(conflicting.sum())
        return found

    def _remember(self, cohort: Cohort) -> None:
        if self.tau > 0:
            self.history.forget(before=cohort.round + 1 - self.tau)
            self.history.remember(cohort.updates, dict(enumerate(cohort.client_ids)), cohort.round)

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes of the remembered rows and their products."""
        if self.tau == 0:
            return {}
        rows = min(self.tau * cohort_size, federation.num_clients, self.max_history or federation.num_clients)
        return {"history": self.history.planned_nbytes(rows, federation.layout, federation.dtype)}

    def reset(self) -> None:
        """Forgets all clients."""
        self.history.clear()
        self.report = StepReport()

    def state_dict(self) -> State:
        """Rows of the last ``tau`` rounds."""
        return {"history": self.history.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.history.load_state_dict(state["history"])
