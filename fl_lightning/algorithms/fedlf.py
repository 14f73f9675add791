# SPDX-License-Identifier: Apache-2.0
"""FedLF: Layer-Wise Fair Federated Learning.

Zibin Pan, Chi Li, Fangchen Yu, Shuyi Wang, Haijin Wang, Xiaoying Tang, Junhua Zhao. AAAI 2024.
https://github.com/zibinpan/FedLF
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from fl_lightning.algorithms._shared.layer_blocks import Block, BlockSolver, joined_blocks
from fl_lightning.algorithms._shared.rows import (
    EQUAL_LOSSES,
    SHORT_DIRECTION,
    Directions,
    RemembersRows,
    Rescaled,
    as_long_as_mean,
    common_descent,
    fair_weights,
    live_rows,
    mean_squares,
    no_step,
    products,
)
from fl_lightning.algorithms.records import Needs, Reading, StepReport
from fl_lightning.arguments import DEVICE, FILLED, Bounds, checked, trusted
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.layout import LayerSpec
from fl_lightning.core.storage.per_client import per_client
from fl_lightning.ops.rows import row_norms

FAIR_ENOUGH = math.pi / 16  # radians between losses and (1, ..., 1): theta of FedMDFG
MIN_DESCENT = 0.9  # of the descent of the mean loss, which the fair-driven row must leave


class FedLF(RemembersRows):
    """A step that no online client conflicts with, in the model and in every layer (Algorithm 1).

    In each layer the direction is the shortest vector in the convex hull of the online clients' rows, the fair-driven
    row (equation 5) and the last rows of clients that have been absent for a short time (section 3.3): it solves
    equation 8. Layers whose direction is zero are combined with a neighbour. The step is as long as the mean of the
    online rows.

    If a layer has no direction, because it is 1e-4 times shorter than the rows or because rounding could turn a slope
    around, FedLF tries in turn: only as many remembered rows, the newest, as keep the rows within the layer's columns;
    these without the fair-driven row, which can make the direction zero where rows depend linearly, against the paper's
    claim; the layer combined with the next one (the last with the previous one), from all rows on again; where none is
    left to combine with, no remembered rows, with and without the fair-driven row. If all fail the layer is not
    updated. The report is flagged where any of this was tried, and where the direction is 100 times shorter than the
    mean of the online rows before it is made as long: clients then agree on nearly everything, and the step follows
    what little tells them apart.

    A row is left out of a layer where it is 1e-8 times shorter than the median of the online ones. The fair-driven row
    is left out for one client, for equal losses and for losses that are all 0. If all rows are zero, the step is zero,
    flagged, and nothing is remembered.

    Args:
        layers: see :meth:`ParamLayout.from_module`. ``"module"`` is the paper's reading, ``"tensor"`` that of the
            authors' code.
        reading: ``"library"`` rescales the rows of a layer to the mean length of the online ones and combines layers;
            ``"paper"`` takes the rows as they are (equations 5 to 8); ``"code"`` does not combine layers.
        history_window: which absent clients count: ``"ratio"`` those of the last (clients seen) / (cohort size) rounds
            (section 3.3), ``"last"`` of the previous round, ``"all"`` or ``"none"``; a number: those of so many rounds.
        gradient_source: ``"update"`` for local training (the paper), ``"full"`` for full gradients (the authors' code).
        fair_row: ``"always"`` lets the fair-driven row take part wherever losses differ (the paper). ``"needed"``, of
            this library, leaves it out where it costs more than it gives: in rounds in which the angle between losses
            and ``(1, ..., 1)`` is at most pi / 16, and in layers in which the mean update falls along the direction
            less than 0.9 times as steeply as without it. No client conflicts with the step either way; losses then turn
            towards equality in fewer rounds.

    Attributes:
        blocks: the layers that shared a direction in the last step, as tuples of indices; ``None`` if none did.

    Raises:
        ValueError: an argument is out of range.
    """

    seen = per_client(bool)

    _fair_kind: Literal["cos", "h", "none"] = "cos"  # equation 5; "h" as in FedMDFG (ablation M5); none (M4)

    @checked(layers=FILLED, history_window=Bounds(0), max_history=Bounds(1), history_device=DEVICE)
    def __init__(
        self,
        layers: LayerSpec = "module",
        reading: Reading = "library",
        history_window: Literal["ratio", "last", "all", "none"] | int = "ratio",
        gradient_source: Literal["update", "full"] = "update",
        max_history: int | None = None,
        history_device: str | None = None,
        fair_row: Literal["always", "needed"] = "always",
    ) -> None:
        rounds = {"none": 0, "last": 1}.get(history_window) if isinstance(history_window, str) else history_window
        super().__init__(rounds, max_history, history_device)
        self.layers, self.history_window = layers, history_window
        self.reading, self.gradient_source, self.fair_row = reading, gradient_source, fair_row
        self.needs = Needs(losses=True, full_gradients=gradient_source == "full")
        self.blocks: tuple[tuple[int, ...], ...] | None = None
        self._equal_lengths, self._combines = reading != "paper", reading != "code"

    def aggregate(self, cohort: Cohort) -> Tensor:
        """See the class."""
        rows = self.joint_rows(cohort, self._since(cohort))  # line 4, and the absent clients of section 3.3
        m, q = len(cohort), self._fair_weights(cohort.known_losses)  # line 5, equation 5
        seen = rows.look(*self._fragments(rows.gram, cohort, q, len(rows.absent)))  # lines 6 to 8
        self.blocks, blocks = None, list[Block]()
        coeff, slopes, squares, fair = seen.coeff, seen.slopes, seen.squares, seen.fair.tolist()
        if not bool(seen.solved.all()):
            gram = rows.on_cpu(rows.gram)
            blocks = self._combine_layers(gram, Directions(coeff, seen.solved, seen.fair), cohort, q)
            coeff = torch.cat([b.coeff.expand(len(b.layers), -1) for b in blocks])
            fair = [b.fair for b in blocks for _ in b.layers]
            slopes, squares = products(gram, coeff), mean_squares(gram, m)
        elif not bool(coeff.any()):  # no online row counts in any layer
            return no_step(self, cohort, merged_layers=0.0, block_conflicts=0.0)  # line 14
        direction = as_long_as_mean(coeff, slopes, squares)  # lines 13 and 15
        step = rows.combine(direction.coeff) if blocks or seen.step is None else seen.step
        self._write_report(cohort, direction, slopes[:, :m] * direction.factor, blocks, len(rows.absent), fair)
        self.seen.update(dict.fromkeys(cohort.client_ids, True))
        self.remember(cohort, 1 / (cohort.client_lr or 1.0))  # as gradients
        return step  # line 16

    def _fair_weights(self, losses: Tensor) -> Tensor | None:
        """``q`` ``[m]``; ``None`` where it is undefined."""
        if self._fair_kind == "none":
            return None
        equal = FAIR_ENOUGH if self.fair_row == "needed" else EQUAL_LOSSES
        return fair_weights(losses, self._fair_kind == "cos", equal)

    def _since(self, cohort: Cohort) -> float | None:
        """``t - tau``, the first round from which absent clients count (section 3.3)."""
        tau = len(self.seen) / len(cohort) if self.history_window == "ratio" else self.window  # M / |S^t|
        return None if tau is None else cohort.round - tau

    def _fragments(self, gram: Tensor, cohort: Cohort, q: Tensor | None, history: int) -> Directions:
        """Equation 8 for layers or blocks, from ``gram [B, m + h, m + h]`` and weights ``q [m]`` of the fair row.

        ``history`` remembered rows are in use, newest first.
        """
        m = len(cohort)
        unused = gram.shape[1] - m - history
        if unused:
            gram = gram[:, : m + history, : m + history]
        found = self._descend(gram, cohort, q)
        if self.fair_row == "needed" and q is not None:
            plain = self._descend(gram, cohort, None)
            falls = _descent(found.coeff, gram, m) >= MIN_DESCENT * _descent(plain.coeff, gram, m)
            helps = found.solved & (~plain.solved | falls)
            coeff = torch.where(helps[:, None], found.coeff, plain.coeff)
            found = Directions(coeff, helps | plain.solved, found.fair & helps)
        return found._replace(coeff=pad(found.coeff, (0, unused))) if unused else found

    def _descend(self, gram: Tensor, cohort: Cohort, q: Tensor | None) -> Directions:
        if self._equal_lengths:
            return common_descent(gram, cohort, q)
        scale = live_rows(row_norms(gram), len(cohort)).to(torch.float64)
        scale[:, len(cohort) :] *= cohort.client_lr or 1.0  # remembered rows are kept in units of the gradient
        return common_descent(gram, cohort, q, scale)

    def _combine_layers(self, gram: Tensor, found: Directions, cohort: Cohort, q: Tensor | None) -> list[Block]:
        """Lines 9 to 12."""

        def descend(k: Tensor, fair: bool, history: int) -> Directions:
            return self._fragments(k, cohort, q if fair else None, history)

        solver = BlockSolver(descend, len(cohort), q is not None)
        return joined_blocks(gram, found, cohort.updates.layout.layer_starts, solver, self._combines)

    def _write_report(
        self, cohort: Cohort, step: Rescaled, slopes: Tensor, blocks: list[Block], remembered: int, fair: list[float]
    ) -> None:
        """From the step's products ``[L, m]`` with the rows, and whether the layers had a fair row."""
        layout = cohort.updates.layout
        if 0 < len(blocks) < layout.num_layers:
            self.blocks = tuple(block.layers for block in blocks)
        solved = self.blocks
        if solved is not None:
            slopes = torch.stack([slopes[list(block)].sum(0) for block in solved])
        fair_layers = {"fair_layers": sum(fair) / len(fair)} if self.fair_row == "needed" else {}
        self.report = trusted(StepReport)(
            weights=layout.layer_shares @ step.coeff[:, : len(cohort)],
            flagged=any(block.flagged for block in blocks) or step.ratio < SHORT_DIRECTION,
            scalars={
                "direction_ratio": step.ratio,
                "history_rows": float(remembered),
                "blocks": float(len(slopes)),
                "merged_layers": float(sum(len(block) for block in solved or () if len(block) > 1)),
                "block_conflicts": float((slopes < 0).sum()),
                **fair_layers,
            },
        )


def _descent(coeff: Tensor, gram: Tensor, online: int) -> Tensor:
    """``[B]`` slopes of the sum of the online rows along unit directions with coefficients ``[B, k]``."""
    products = (gram @ coeff[:, :, None])[:, :, 0]
    size = (coeff * products).sum(1).clamp_min(0).sqrt()
    return torch.where(size > 0, products[:, :online].sum(1) / size, 0.0)
