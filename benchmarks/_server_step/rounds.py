# SPDX-License-Identifier: Apache-2.0
"""Rounds of a server that runs FedLF, and the same step in the vector form with one interior-point QP per layer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._kernels.problems import Shape
from benchmarks._server_step.oracles import Oracle
from fl_lightning.algorithms import FedLF
from fl_lightning.algorithms._shared.rows import fair_weights
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.updates import UpdateMatrix

_SHIFT = 64  # elements between the beginnings of two clients' noise


class NoFairRow(FedLF):
    """FedLF without the fair-driven row."""

    _fair_kind = "none"


class Server:
    """A server with random updates that share a direction, so that the clients agree in part.

    Args:
        shape: the network; every tensor is a layer.
        online: ``m``, clients per round.
        clients: registered clients; more than ``online`` means that the others are remembered, all of them.
        seed: of updates, losses and cohorts.
        fair_row: of FedLF. Without it every row takes part in the step; with it remembered rows often need not.
    """

    def __init__(
        self, shape: Shape, online: int, clients: int, seed: int, fair_row: Literal["cos", "none"] = "cos"
    ) -> None:
        self.layout = ParamLayout.from_sizes([b - a for a, b in pairwise(shape.offsets.tolist())])
        self.online, self.clients = online, clients
        self._generator = torch.Generator().manual_seed(seed)
        self._random = random.Random(seed)
        n = self.layout.numel
        self._noise = torch.randn(n + _SHIFT * 1000, generator=self._generator)
        self._shared = torch.randn(n, generator=self._generator)
        self.rows = torch.empty(online, n)
        self._params, self._sizes = torch.zeros(n), torch.full((online,), 600.0)
        remembering = clients > online
        self.rule = (FedLF if fair_row == "cos" else NoFairRow)(
            layers="tensor",
            history_window="all" if remembering else "none",
            max_history=clients if remembering else 1,
        )
        self._round = 0
        for first in range(0, clients, online) if remembering else ():  # until every client has been seen
            ids = [client % clients for client in range(first, first + online)]
            self.rule.aggregate(self.cohort(ids))

    def cohort(self, ids: Sequence[int] | None = None) -> Cohort:
        """The reports of the next round, by default of random clients."""
        for row in self.rows:
            start = _SHIFT * self._random.randrange(1000)
            torch.add(self._noise[start : start + len(row)], self._shared, alpha=0.5, out=row)
        losses = torch.rand(self.online, generator=self._generator) + 0.5
        chosen = self._random.sample(range(self.clients), self.online) if ids is None else ids
        self._round += 1
        return Cohort(
            self._params, UpdateMatrix(self.rows, self.layout), losses, self._sizes, tuple(chosen), self._round, 0.1
        )


def vector_form(cohort: Cohort, solve: Oracle) -> Tensor:
    """What FedLF does without history, on the rows themselves: per layer rows of equal length, the fair row, a QP."""
    losses = cohort.known_losses
    weights = fair_weights(losses)
    if weights is None:
        raise ValueError(f"losses must differ, found {losses.tolist()}")
    parts = []
    for start, stop in pairwise(cohort.updates.layout.layer_starts):
        rows = cohort.updates.rows[:, start:stop]
        if start == stop:
            continue
        norms = rows.norm(dim=1, keepdim=True)
        rows = rows / norms * norms.mean()
        fair = weights.float() @ rows
        rows = torch.cat([rows, (fair / fair.norm() * norms.mean())[None]])
        lam = solve.prepare((rows @ rows.T).double().numpy())()
        parts.append(torch.from_numpy(lam).float() @ rows)
    step = torch.cat(parts)
    step *= cohort.updates.rows.mean(0).norm() / step.norm()
    return step


class Products(TorchDispatchMode):
    """Records which inner products of rows are computed: the op, and its numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, int]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func).removeprefix("fl_lightning.").removesuffix(".default")
        if name in ("layer_gram", "layer_cross_gram", "layer_chosen_gram"):
            rows, others = args[0], args[{"layer_gram": 0, "layer_cross_gram": 1, "layer_chosen_gram": 3}[name]]
            self.seen.append((name, len(rows), len(others)))
        return func(*args, **kwargs or {})
