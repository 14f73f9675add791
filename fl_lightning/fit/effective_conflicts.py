# SPDX-License-Identifier: Apache-2.0
"""Conflicts in what LoRA factors do together: two clients can agree in the factors and disagree in the products.

Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen: LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022. A
layer's weights are ``W + s B A`` with trained factors. An update ``(dA, dB)`` changes them by

    s (B A - (B - dB) (A - dA)) = s (dB (A - dA) + B dA) = s [dB, B] [A - dA; dA],

a product of rank ``2 r``. The inner product of two such products needs blocks of the rank's size alone:
``<L R, L' R'> = tr((L^T L') (R' R^T))``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from fl_lightning.core.cohort import Cohort
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.updates import Columns
from fl_lightning.ops.dtypes import accumulation_device

_FACTOR = re.compile(r"(?:(.*?)\.)?(lora_(?:embedding_)?)A(?:\.(.*))?")


@dataclass(frozen=True)
class _Pair:
    """The factors of a layer."""

    names: tuple[str, str]  # of A [r, ...] and B [..., r]
    rank: int
    scaling: float  # multiplies the product


class EffectiveConflicts:
    """Counts a round's clients whose update has a negative inner product with the step in the effective weights.

    Pairs are parameters named ``lora_A`` and ``lora_B``, or ``lora_embedding_A`` and ``lora_embedding_B``, as PEFT and
    loralib name them, whose shapes multiply. One of a pair may be frozen. ``scaling`` of their layer counts. All other
    trained parameters count as they are.
    """

    def __init__(self, module: nn.Module, layout: ParamLayout) -> None:
        self._module, self._layout = module, layout
        self._pairs = _pairs(module, layout)

    def count(self, cohort: Cohort, step: Tensor) -> dict[str, float]:
        """The count by the name that it is logged under, from the columns that are here; nothing without pairs."""
        if not self._pairs:
            return {}
        updates, layout = cohort.updates, self._layout
        held = dict(zip(layout.names, pairwise(layout.starts), strict=True))
        paired = {name for pair in self._pairs for name in pair.names}
        others = [place for place, name in enumerate(layout.names) if name not in paired]
        products = torch.zeros(len(updates), dtype=torch.float64)
        if others:
            products += updates.dots(step, layout.starts)[others].sum(0).cpu()
        parameters = dict(self._module.named_parameters())
        parts = [cohort.params[None], updates.rows, step[None]]
        for pair in self._pairs:
            factors = []
            for name in pair.names:
                if name in held:
                    factors.append(_columns(updates.columns, parts, *held[name]))
                else:
                    whole = parameters[name].detach().reshape(1, -1)
                    factors.append(torch.cat([whole, whole.new_zeros(len(updates) + 1, whole.shape[1])]))
            products += pair.scaling**2 * _inner_products(factors[0], factors[1], pair.rank)
        return {"conflicts_effective": float((products < 0).sum())}


def _pairs(module: nn.Module, layout: ParamLayout) -> list[_Pair]:
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    found = []
    for first, shape in shapes.items():
        if (factor := _FACTOR.fullmatch(first)) is None:
            continue
        second = f"{first[: factor.end(2)]}B{first[factor.end(2) + 1 :]}"
        trained = first in layout.names or second in layout.names
        if trained and second in shapes and shape[:1] == (prod(shapes[second][1:]),):
            owner = module.get_submodule(factor[1] or "")
            found.append(_Pair((first, second), shape[0], _scaling(owner, factor[3] or "")))
    return found


def _scaling(owner: nn.Module, rest: str) -> float:
    """A layer's number, or that of the adapter whose name begins the rest of a factor's name."""
    given = getattr(owner, "scaling", 1.0)
    if isinstance(given, Mapping):
        given = given.get(rest.partition(".")[0], 1.0)
    return float(given) if isinstance(given, (int, float)) else 1.0


def _columns(columns: Columns, parts: Sequence[Tensor], first: int, end: int) -> Tensor:
    """Columns from ``first`` to ``end`` of rows of which every share holds its own columns."""
    within = [(max(begin, first), max(begin, first, min(stop, end))) for begin, stop in columns.spans]
    begin, (a, b) = columns.span[0], within[columns.share]
    mine = torch.cat([part[:, a - begin : b - begin] for part in parts])
    return torch.cat(columns.gather(mine.T.contiguous(), [stop - start for start, stop in within])).T


def _inner_products(first: Tensor, second: Tensor, rank: int) -> Tensor:
    """What updates do to a product, times what the step does to it: ``[m]`` float64 on the CPU.

    ``first [m + 2, r * in]`` is the factor ``A``, its updates, its step; ``second [m + 2, out * r]`` the same of ``B``.
    """
    device = accumulation_device(first)
    a = first.to(device, torch.float64).reshape(len(first), rank, -1)  # [m + 2, r, in]
    b = second.to(device, torch.float64).reshape(len(second), -1, rank)  # [m + 2, out, r]
    left = torch.cat([b[1:], b[:1].expand_as(b[1:])], 2)  # [dB, B]
    right = torch.cat([a[:1] - a[1:], a[1:]], 1)  # [A - dA; dA]
    blocks = (left[:-1].mT @ left[-1]) * (right[:-1] @ right[-1].T)  # [m, 2 r, 2 r]
    return blocks.sum((1, 2)).cpu()
