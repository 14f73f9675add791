# SPDX-License-Identifier: Apache-2.0
"""FedLF: Layer-Wise Fair Federated Learning.

Zibin Pan, Chi Li, Fangchen Yu, Shuyi Wang, Haijin Wang, Xiaoying Tang, Junhua Zhao. AAAI 2024.
https://github.com/zibinpan/FedLF
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.common_descent import (
    ZERO_DIRECTION,
    ZERO_ROW,
    check_rows,
    common_descent,
    fair_weights,
    rounding_error,
    row_norms,
)
from fl_lightning.algorithms._shared.layer_blocks import Block, BlockSolver, joined_blocks
from fl_lightning.algorithms.base import Federation, Needs, ServerRule, State, StepReport
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.layout import LayerSpec
from fl_lightning.core.storage.row_history import RowHistory


class FedLF(ServerRule):
    """A step that no online client conflicts with, in the model and in every layer (Algorithm 1).

    In each layer the direction is the shortest vector in the convex hull of the online clients' rows, the fair-driven
    row (equation 5) and the last rows of clients that have been absent for a short time (section 3.3): it solves
    equation 8. Layers whose direction is zero are combined with a neighbour. The whole is rescaled to the length of the
    mean of the online rows.

    Degenerate cases. A row is left out of a layer where it is 1e-8 times shorter than the longest; a layer without rows
    does not move. The fair row is left out for one client, for equal losses and for losses that are all 0. With rows
    that depend linearly it can make the direction zero although all clients agree on one, against the paper's claim. So
    where the direction is zero, by ``zero_tol`` or because rounding could turn a slope around, the oldest remembered
    rows leave until the rows no longer outnumber the layer's columns, then the fair row leaves, and only then layers
    are combined. What cannot be combined any more tries without remembered rows, and otherwise stays where it is. The
    report is flagged when any of this happened. If all rows are zero, the step is zero and nothing is remembered.

    Args:
        layers: see :meth:`ParamLayout.from_module`. ``"module"`` is the paper's reading, ``"tensor"`` that of the
            authors' code.
        equalise_layer_norm: rescale the rows of a layer to the mean length of the online ones (the authors' code);
            otherwise they enter as they are (equations 5 to 8).
        merge_zero_layers: combine layers (Algorithm 1, lines 9 to 12).
        fair_row: ``"cos"`` as in equation 5, ``"h"`` as in FedMDFG (ablation M5), ``"none"`` for no such row (M4). The
            two differ in length only, so with equalised rows they are the same.
        history_window: which absent clients count: ``"ratio"`` those of the last (clients seen) / (cohort size) rounds
            (section 3.3), ``"last"`` of the previous round (M7), ``"all"`` (M8) or ``"none"`` (M6); a number: those of
            so many rounds.
        gradient_source: ``"update"`` for local training (the paper), ``"full"`` for full gradients (the authors' code).
        zero_tol: a direction this much shorter than the root mean square of its rows counts as zero.
        max_history: most rows to remember, oldest dropped first; ``None``: one for every client seen.
        history_device: where remembered rows live, for instance ``"cpu"``; ``None``: beside the updates.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        layers: LayerSpec = "module",
        equalise_layer_norm: bool = True,
        merge_zero_layers: bool = True,
        fair_row: Literal["cos", "h", "none"] = "cos",
        history_window: Literal["ratio", "last", "all", "none"] | int = "ratio",
        gradient_source: Literal["update", "full"] = "update",
        zero_tol: float = ZERO_DIRECTION,
        max_history: int | None = None,
        history_device: str | None = None,
    ) -> None:
        if not 0 < zero_tol < 1:
            raise ValueError(f"zero_tol of FedLF must lie between 0 and 1, found {zero_tol}")
        if isinstance(history_window, int) and history_window < 0:
            raise ValueError(f"history_window of FedLF must not be negative, found {history_window}")
        self.layers = layers
        self.needs = Needs(losses=True, full_gradients=gradient_source == "full")
        self.equalise_layer_norm = equalise_layer_norm
        self.merge_zero_layers = merge_zero_layers
        self.fair_row = fair_row
        self.history_window = history_window
        self._rounds = {"none": 0, "last": 1}.get(history_window) if isinstance(history_window, str) else history_window
        self.zero_tol = zero_tol
        self.max_history = max_history
        self.history = RowHistory(max_history, history_device)
        self._seen: set[int] = set()

    def begin_fit(self, federation: Federation) -> None:
        """Never allocates more rows than there are clients."""
        self.history.capacity = min(self.max_history or federation.num_clients, federation.num_clients)

    def aggregate(self, cohort: Cohort) -> Tensor:
        """See the class.

        Raises:
            ValueError: the cohort has no losses, or a row is not finite.
        """
        m, losses, absent = len(cohort), cohort.known_losses, self._absent(cohort)
        # K^l [L, m + h, m + h], beside the rows
        gram = self.history.joint_gram(cohort.updates, absent, cohort.client_ids)
        q = None if self.fair_row == "none" else fair_weights(losses, cosine=self.fair_row == "cos")
        if q is not None and q.is_cpu and not bool(q.any()):
            q = None  # undefined; on a device nobody looks, and a row of zeros is left out of the hull
        layers, solved = self._descend(gram, cohort, q, len(absent))  # lines 5 to 8
        coeff = _rescaled(layers, gram, m)  # line 15
        norms = row_norms(gram)
        usual = solved.all() & norms.isfinite().all() & norms[:, :m].any()

        # A device goes on while it is asked: the step is queued before the only look at what is there.
        step = None if gram.is_cpu else self.history.combine(cohort.updates, coeff, absent)
        seen = torch.cat([usual.to(coeff)[None], coeff.flatten()]).cpu()
        coeff, blocks = seen[1:].view(coeff.shape), list[Block]()
        if not bool(seen[0]):
            gram, step = gram.cpu(), None
            check_rows(gram, cohort, "FedLF")
            if not bool(row_norms(gram)[:, :m].any()):
                self.report = StepReport(weights=torch.zeros(m, dtype=torch.float64), flagged=True)
                return torch.zeros_like(cohort.params)
            blocks = self._blocks(gram, layers.cpu(), solved.cpu(), cohort, q)  # lines 9 to 12
            for block in blocks:
                coeff[list(block.layers)] = block.coeff
            coeff = _rescaled(coeff, gram, m)
        if step is None:
            step = self.history.combine(cohort.updates, coeff, absent)

        self._remember(cohort)
        merged = tuple(block.layers for block in blocks) if 0 < len(blocks) < len(coeff) else None
        self.report = StepReport(
            weights=_shares(cohort) @ coeff[:, :m],
            blocks=merged,
            flagged=any(block.flagged for block in blocks),
            scalars={"history_rows": float(len(absent)), "blocks": float(len(merged or coeff))},
        )
        return step

    def _blocks(self, gram: Tensor, layers: Tensor, solved: Tensor, cohort: Cohort, q: Tensor | None) -> list[Block]:
        """Directions of layers, and of layers combined where theirs are zero; on the CPU, whatever ``q`` is on."""
        q = None if q is None or not bool(q.any()) else q.cpu()
        solver = BlockSolver(
            lambda grams, fair, history: self._descend(grams, cohort, q if fair else None, history),
            len(cohort),
            q is not None,
        )
        starts = cohort.updates.layout.layer_starts
        return joined_blocks(gram, layers, solved, starts, solver, self.merge_zero_layers)

    def _descend(self, gram: Tensor, cohort: Cohort, q: Tensor | None, history: int) -> tuple[Tensor, Tensor]:
        """Coefficients ``[B, m + h]`` of the shortest vectors of a batch of blocks, and whether they are not zero.

        Args:
            gram: ``[B, m + h, m + h]``.
            cohort: the cohort.
            q: ``[m]`` weights of the fair row.
            history: number of remembered rows in use, newest first.
        """
        m, norms = len(cohort), row_norms(gram)
        live = norms > ZERO_ROW * norms[:, :m].amax(1, keepdim=True)
        live[:, m + history :] = False
        # mu_l: mean length of the online rows of the layer
        mu = (norms * live)[:, :m].sum(1, keepdim=True) / live[:, :m].sum(1, keepdim=True).clamp_min(1)
        scale = live.to(torch.float64)
        if self.equalise_layer_norm:
            scale = torch.where(live, mu / norms, 0.0)
        else:
            scale[:, m:] *= cohort.client_lr or 1.0  # remembered rows are kept in units of the gradient
        fair = None
        if q is not None:
            fair = torch.zeros_like(scale)  # g_P = sum_i q_i g_i
            fair[:, :m] = q * scale[:, :m]
            if self.equalise_layer_norm:
                length = (fair * (gram @ fair[:, :, None])[:, :, 0]).sum(1, keepdim=True).clamp_min(0).sqrt()
                fair = torch.where(length > self.zero_tol * q.norm() * mu, fair * mu / length, 0.0)
        return common_descent(gram, scale, fair, m, rounding_error(cohort), self.zero_tol)

    def _absent(self, cohort: Cohort) -> list[int]:
        """Clients to treat as if online (section 3.3), newest first."""
        tau: float | None = self._rounds
        if self.history_window == "ratio":
            tau = len(self._seen) / len(cohort)  # M / |S^t|
        since = None if tau is None else cohort.round - tau
        return self.history.select(exclude=set(cohort.client_ids), since=since)

    def _remember(self, cohort: Cohort) -> None:
        self._seen.update(cohort.client_ids)
        if self._rounds == 0:
            return
        if self._rounds is not None:
            self.history.forget(before=cohort.round + 1 - self._rounds)
        clients = dict(enumerate(cohort.client_ids))
        self.history.remember(cohort.updates, clients, cohort.round, 1 / (cohort.client_lr or 1.0))

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes of the remembered rows and their products."""
        rows = min(federation.num_clients, self.max_history or federation.num_clients)
        if self._rounds is not None:
            rows = min(rows, self._rounds * cohort_size)
        return {"history": self.history.planned_nbytes(rows, federation.layout, federation.dtype)} if rows else {}

    def reset(self) -> None:
        """Forgets all clients."""
        self.history.clear()
        self._seen.clear()
        self.report = StepReport()

    def state_dict(self) -> State:
        """Remembered rows, and the clients seen."""
        return {"history": self.history.state_dict(), "seen": torch.tensor(sorted(self._seen), dtype=torch.int64)}

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.history.load_state_dict(state["history"])
        self._seen = set(state["seen"].tolist())


def _rescaled(coeff: Tensor, gram: Tensor, m: int) -> Tensor:
    """Coefficients of a step that is as long as the mean of the online rows."""
    length = (coeff * (gram @ coeff[:, :, None])[:, :, 0]).sum().clamp_min(0).sqrt()  # ||d||
    target = gram[:, :m, :m].mean((1, 2)).sum().clamp_min(0).sqrt()  # ||1/m sum_i g_i||, rows as they came
    return coeff * torch.where(length > 0, target / length, 0.0)


def _shares(cohort: Cohort) -> Tensor:
    """``[L]`` shares of the layers in the model's parameters."""
    return cohort.updates.layout.offsets.diff().to(torch.float64) / cohort.updates.layout.numel
