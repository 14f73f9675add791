# SPDX-License-Identifier: Apache-2.0
"""What one would write in PyTorch in place of each op, with care for its speed: few calls, of rows cut beforehand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle, pairwise

import torch
from torch import Tensor

from benchmarks._kernels.problems import BOUNDS, ON_GRAM, PARTICIPATIONS, THRESHOLD, Problem
from fl_lightning.ops import _gram_problems

IN_FLOAT64 = (*ON_GRAM, "trimmed_mean")  # what is written here for these has float64 sums whatever is asked for
_BLOCK = 1 << 17  # float64 numbers that are converted at a time: 1 MiB stays in a core's cache


def by_hand(op: str, problem: Problem, wide: torch.dtype) -> Callable[[], object]:
    """The op in torch with sums of the dtype ``wide``.

    Takes whole layers, and rows of another dtype than ``wide`` in blocks of columns, which it converts. Of the ops on
    Gram matrices this is the reference, which takes all layers at a time.
    """
    rows, others, gram, m = problem.rows, problem.others, problem.gram, problem.m
    if op == "project_conflicts":
        return partial(_gram_problems.project_conflicts, gram, problem.order, problem.fixed)
    if op == "min_norm":
        return partial(_gram_problems.min_norm, gram)
    if op == "common_descent":
        return partial(_gram_problems.common_descent, gram, m, None, problem.losses, **BOUNDS)
    n = problem.shape.columns
    narrow = n if rows.device.type != "cpu" else _BLOCK if op == "puc_track" else max(2048, _BLOCK // m)
    width = n if rows.dtype == wide and op != "puc_track" else narrow
    out = torch.empty(n, dtype=rows.dtype, device=rows.device)
    if op in ("puc_combine", "trimmed_mean"):  # layers are nothing to them
        places = [slice(begin, begin + narrow) for begin in range(0, n, narrow)]
        if op == "trimmed_mean":
            return partial(_trimmed_mean, [(rows[:, part], out[part]) for part in places], m // 5, out)
        kept = [(rows[:, part], problem.kept[:, part], out[part]) for part in places]
        return partial(_puc_combine, kept, problem.weights.to(wide), out)
    layers = enumerate(pairwise(problem.shape.offsets.tolist()))
    spans = ((i, b, min(b + width, stop), b > start) for i, (start, stop) in layers for b in range(start, stop, width))
    parts = [(i, slice(begin, end), more) for i, begin, end, more in spans]
    if op in ("layer_combine", "layer_cross_combine"):
        coeff = (problem.coeff if op == "layer_combine" else problem.both_coeff).to(wide)
        held = (rows,) if op == "layer_combine" else (rows, others)
        sizes = [len(matrix) for matrix in held]
        terms = [([x[:, part].T for x in held], coeff[i].split(sizes), out[part]) for i, part, _ in parts]
        return partial(_combine, terms, out)
    if op == "puc_track":
        return _Track(problem, parts, wide)
    kind = {"layer_gram": (m, m), "layer_cross_gram": (m, len(others)), "layer_dots": (m,), "layer_squares": (m,)}[op]
    sums = torch.zeros(problem.shape.layers, *kind, dtype=wide, device=rows.device)
    right = others[0] if op == "layer_dots" else others.T
    cut = [(sums[i], more, rows[:, part], right[part]) for i, part, more in parts]
    return partial({"layer_gram": _gram, "layer_squares": _squares}.get(op, _products), cut, sums)


Cut = list[tuple[Tensor, bool, Tensor, Tensor]]
"""Of each part: the sum of its layer, whether that has begun, the rows, and what they are multiplied by."""


def _gram(cut: Cut, sums: Tensor) -> Tensor:
    for total, more, part, _ in cut:
        x = part.to(total.dtype)
        torch.addmm(total, x, x.T, beta=more, out=total)
    return sums


def _products(cut: Cut, sums: Tensor) -> Tensor:
    multiply = torch.addmm if sums.dim() == 3 else torch.addmv
    for total, more, part, right in cut:
        multiply(total, part.to(total.dtype), right.to(total.dtype), beta=more, out=total)
    return sums


def _squares(cut: Cut, sums: Tensor) -> Tensor:
    for total, more, part, _ in cut:
        total.mul_(more).add_(torch.linalg.vector_norm(part.to(total.dtype), dim=1).square_())
    return sums


def _combine(terms: list[tuple[list[Tensor], tuple[Tensor, ...], Tensor]], out: Tensor) -> Tensor:
    for matrices, coefficients, place in terms:
        wide = coefficients[0].dtype
        total = torch.mv(matrices[0].to(wide), coefficients[0], out=place if place.dtype == wide else None)
        for matrix, own in zip(matrices[1:], coefficients[1:], strict=True):
            total.addmv_(matrix.to(wide), own)
        if total is not place:
            place.copy_(total)
    return out


def _puc_combine(parts: list[tuple[Tensor, Tensor, Tensor]], weights: Tensor, out: Tensor) -> Tensor:
    """Bits lie there as booleans."""
    for part, keep, place in parts:
        kept = keep.to(weights.dtype)
        total = weights @ kept
        place.copy_((weights @ kept.mul_(part)).div_(total).nan_to_num_(0))
    return out


def _trimmed_mean(parts: list[tuple[Tensor, Tensor]], trim: int, out: Tensor) -> Tensor:
    for part, place in parts:
        ordered = part.T.contiguous().sort(1).values
        place.copy_(ordered[:, trim : len(part) - trim].mean(1, dtype=torch.float64))
    return out


class _Track:
    """On another client each time, and without packing bits."""

    def __init__(self, problem: Problem, parts: list[tuple[int, slice, bool]], wide: torch.dtype) -> None:
        clients = list(zip(problem.rows, problem.counts, strict=False))
        self._cuts = cycle([[(i, row[part], counts[part]) for i, part, _ in parts] for row, counts in clients])
        self._sums = torch.zeros(problem.shape.layers, dtype=wide, device=problem.rows.device)

    def __call__(self) -> Tensor:
        self._sums.zero_()
        for i, row, counts in next(self._cuts):
            increase = row <= 0
            keep = (increase & (counts >= THRESHOLD)) | (~increase & (counts <= PARTICIPATIONS - THRESHOLD))
            counts.add_(increase.view(torch.uint8))
            kept = keep.to(self._sums.dtype).mul_(row)
            self._sums[i].add_(torch.linalg.vector_norm(kept).square_())
        return self._sums
