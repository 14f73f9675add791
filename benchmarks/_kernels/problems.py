# SPDX-License-Identifier: Apache-2.0
"""The shapes, and for each op its arguments, and the bytes and operations that it cannot do without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle

import torch
from torch import Tensor
from torchvision.models import resnet18

from benchmarks.papers.architectures import MLP, CifarCNN
from fl_lightning import ops
from fl_lightning.ops import _reference

OPS = tuple(ops.backend())
ON_GRAM = ("project_conflicts", "min_norm", "common_descent")  # float64 whatever the rows' dtype
REMEMBERED = 10  # rows of the other matrix of layer_cross_gram and layer_cross_combine
BOUNDS = {"zero_row": 1e-8, "zero_direction": 1e-4, "rounding": 1e-7}  # of common_descent, as FedLF has them
TRACKED, THRESHOLD, PARTICIPATIONS = 10, 3, 8  # of puc_track: clients that it passes over in turn, and its numbers


@dataclass(frozen=True)
class Shape:
    """A network's parameters, one layer per tensor."""

    name: str
    offsets: Tensor

    @property
    def columns(self) -> int:
        """Number of parameters."""
        return int(self.offsets[-1])

    @property
    def layers(self) -> int:
        """Number of tensors."""
        return len(self.offsets) - 1


def shapes(quick: bool) -> list[Shape]:
    """MLP, CNN and ResNet-18; with ``quick`` one small shape with an empty layer."""
    if quick:
        return [Shape("tiny", torch.tensor([0, 3_000, 3_000, 3_017, 9_000]))]
    with torch.device("meta"):
        networks = {"MLP": MLP(), "CNN": CifarCNN(), "ResNet-18": resnet18()}
    return [
        Shape(name, torch.tensor([0, *(p.numel() for p in network.parameters())]).cumsum(0))
        for name, network in networks.items()
    ]


@dataclass(frozen=True)
class Case:
    """One op on one problem.

    Attributes:
        op: its name.
        run: calls the public function.
        bytes: each input read once and each output written once.
        flops: multiplications and additions; of a symmetric result one half counts; 0 where they depend on the data.
    """

    op: str
    run: Callable[[], object]
    bytes: int
    flops: int


class Problem:
    """Random arguments for one shape, number of clients and dtype."""

    def __init__(self, shape: Shape, m: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.shape, self.m, self.device = shape, m, device
        generator = torch.Generator().manual_seed(seed)
        n, layers = shape.columns, shape.layers
        noise = torch.randn(n + 64 * (m + REMEMBERED), generator=generator)
        self.rows, self.others = (torch.empty(count, n, dtype=dtype, device=device) for count in (m, REMEMBERED))
        for i, row in enumerate((*self.rows, *self.others)):
            row.copy_(noise[64 * i : 64 * i + n])
        words = torch.randint(-(2**31), 2**31, (m, -(-n // 32)), dtype=torch.int32, generator=generator)
        self.keep = words.to(device)
        self.counts = torch.zeros(min(m, TRACKED), n, dtype=torch.uint8, device=device)
        self.coeff = torch.randn(layers, m, dtype=torch.float64, generator=generator).to(device)
        self.weights = (torch.rand(m, generator=generator) + 0.1).to(device)
        # Clients that agree in part: as many directions as clients, and one that all share.
        vectors = torch.randn(layers, m, m + 1, dtype=torch.float64, generator=generator)
        vectors[:, :, 0] = 1
        self.gram = (vectors @ vectors.mT).to(device)
        self.losses = torch.linspace(-1, 1, m, dtype=torch.float64).to(device)  # less their mean: weights of a fair row
        self.order = torch.randperm(m, generator=generator)
        self.fixed = torch.zeros(m, dtype=torch.bool)
        self.both_coeff = torch.randn(layers, m + REMEMBERED, dtype=torch.float64, generator=generator).to(device)

    @cached_property
    def kept(self) -> Tensor:
        """The bits of ``keep`` as booleans, ``[m, n]``."""
        kept = torch.empty(self.m, self.shape.columns, dtype=torch.bool, device=self.device)
        for row, words in zip(kept, self.keep, strict=True):
            row.copy_(_reference._unpack(words)[: self.shape.columns])
        return kept

    def cases(self, chosen: tuple[str, ...]) -> Iterator[Case]:
        """The chosen ops."""
        n, m, layers, offsets = self.shape.columns, self.m, self.shape.layers, self.shape.offsets
        rows, others, coeff = self.rows, self.others, self.coeff
        size = rows.element_size()
        read, bits = n * m * size, n * m // 8
        clients = cycle(range(len(self.counts)))

        def track() -> object:
            """On another client each time, so that its update comes from memory."""
            client = next(clients)
            return ops.puc_track(rows[client], self.counts[client], THRESHOLD, PARTICIPATIONS, offsets)

        square = 8 * layers * m * m
        every = {
            "layer_gram": (partial(ops.layer_gram, rows, offsets), read + square, n * m * (m + 1)),
            "layer_squares": (partial(ops.layer_squares, rows, offsets), read + 8 * layers * m, 2 * n * m),
            "layer_cross_gram": (
                partial(ops.layer_cross_gram, rows, others, offsets),
                read + n * REMEMBERED * size + 8 * layers * m * REMEMBERED,
                2 * n * m * REMEMBERED,
            ),
            "layer_dots": (
                partial(ops.layer_dots, rows, others[0], offsets),
                read + n * size + 8 * layers * m,
                2 * n * m,
            ),
            "layer_combine": (
                partial(ops.layer_combine, rows, offsets, coeff),
                read + n * size + 8 * layers * m,
                2 * n * m,
            ),
            "layer_cross_combine": (
                partial(ops.layer_cross_combine, rows, others, offsets, self.both_coeff),
                read + n * (REMEMBERED + 1) * size + 8 * layers * (m + REMEMBERED),
                2 * n * (m + REMEMBERED),
            ),
            "project_conflicts": (
                partial(ops.project_conflicts, self.gram, self.order, self.fixed),
                2 * square,
                0,
            ),
            "min_norm": (partial(ops.min_norm, self.gram), square + 8 * layers * (m + 1), 0),
            "common_descent": (
                partial(ops.common_descent, self.gram, m, None, self.losses, **BOUNDS),
                square + 8 * layers * m + 2 * layers,
                0,
            ),
            "puc_track": (track, n * (size + 2) + n // 8 + 8 * layers, 2 * n),
            "puc_combine": (
                partial(ops.puc_combine, rows, self.keep, self.weights),
                read + bits + n * size,
                3 * n * m,
            ),
            "trimmed_mean": (partial(ops.trimmed_mean, rows, m // 5), read + n * size, 0),
        }
        for op in chosen:
            yield Case(op, *every[op])
