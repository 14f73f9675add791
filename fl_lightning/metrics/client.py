# SPDX-License-Identifier: Apache-2.0
"""Stateful per-client metrics: they gather samples by client id and give one number over the clients.

Each is a ``torchmetrics.Metric``: sums and counts per client add up over batches and, under DDP, over processes.
``compute`` averages a client's samples first and applies the function of the same name in
:mod:`fl_lightning.metrics.functional` to the clients' averages. Clients without a sample do not count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.arguments import Bounds, checked
from fl_lightning.metrics import functional as F
from fl_lightning.metrics.group_frame import client_numbers


class _PerClient(Metric, ABC):
    is_differentiable = False
    full_state_update = False

    sums: Tensor
    counts: Tensor

    @checked(num_clients=Bounds(1))
    def __init__(self, num_clients: int) -> None:
        super().__init__()
        self.num_clients = num_clients
        self.add_state("sums", torch.zeros(num_clients, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("counts", torch.zeros(num_clients, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, values: Tensor, client_ids: Tensor | int) -> None:
        """Adds samples.

        Args:
            values: ``[B]`` or scalar; one value per sample, for instance whether its prediction is right.
            client_ids: ``[B]`` integers in ``[0, num_clients)``, or one id for all values.

        Raises:
            ValueError: shapes differ, an id is out of range or no integer, or a value is not finite.
        """
        flat = values.detach().reshape(-1).to(self.sums)
        ids = client_numbers(client_ids, flat, self.num_clients)
        finite = flat.isfinite()
        if not bool(finite.all()):
            found = sorted(set(ids[~finite].tolist()))
            raise ValueError(f"values must be finite, found others for clients {found}")
        self.sums.index_add_(0, ids, flat)
        self.counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int64))

    def client_values(self) -> Tensor:
        """``[num_clients]`` averages of the samples seen by this process; NaN for clients without a sample."""
        return self.sums / self.counts

    def compute(self) -> Tensor:
        """The statistic over the clients, a scalar."""
        return self._statistic(self.client_values())

    @abstractmethod
    def _statistic(self, values: Tensor) -> Tensor: ...

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        # Sums stay wide where the module becomes float32 or bfloat16: 16,777,217 ones are 16,777,216 in the first, and
        # 257 are 256 in the second.
        sums, start = self.sums, self._defaults["sums"]
        self.sums = self._defaults["sums"] = torch.zeros_like(self.counts)  # not what MPS refuses
        moved = super()._apply(fn, *args, **kwargs)
        device = self.sums.device
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.sums, self._defaults["sums"] = sums.to(device, wide), start.to(device, wide)  # type: ignore[union-attr]
        return moved


class FairnessAngle(_PerClient):
    r"""Angle between the clients' averages :math:`a_i` and equal values, in radians; 0 is the fairest.

    .. math::
        \varphi = \arccos \frac{|\sum_i a_i|}{\lVert a \rVert \sqrt{N}}

    Args:
        num_clients: how many clients there are; ids run from 0.

    Example:
        >>> from fl_lightning.metrics import FairnessAngle
        >>> metric = FairnessAngle(num_clients=2)
        >>> metric.update(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.3218, dtype=torch.float64)
    """

    higher_is_better = False

    def _statistic(self, values: Tensor) -> Tensor:
        return F.fairness_angle(values)


class ClientStd(_PerClient):
    r"""Population standard deviation of the clients' averages :math:`a_i`.

    .. math::
        \sqrt{\frac1N \sum_i (a_i - \bar a)^2}

    Args:
        num_clients: how many clients there are; ids run from 0.

    Example:
        >>> from fl_lightning.metrics import ClientStd
        >>> metric = ClientStd(num_clients=2)
        >>> metric.update(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.2500, dtype=torch.float64)
    """

    higher_is_better = False

    def _statistic(self, values: Tensor) -> Tensor:
        return F.std(values)


class WorstFraction(_PerClient):
    r"""Mean of the clients' averages over the worst clients, :math:`k = \max(1, \operatorname{round}(fraction \, N))`.

    .. math::
        \frac1k \sum_{i \le k} a_{(i)}

    with the averages sorted from the worst.

    Args:
        num_clients: how many clients there are; ids run from 0.
        fraction: share of the clients, in (0, 1].
        larger_is_better: orientation of the values.

    Example:
        >>> from fl_lightning.metrics import WorstFraction
        >>> metric = WorstFraction(num_clients=4, fraction=0.25)
        >>> metric.update(torch.tensor([0.9, 0.2, 0.5]), torch.tensor([0, 1, 3]))
        >>> metric.compute()
        tensor(0.2000, dtype=torch.float64)
    """

    @checked(num_clients=Bounds(1), fraction=Bounds(above=0, most=1))
    def __init__(self, num_clients: int, fraction: float, larger_is_better: bool = True) -> None:
        super().__init__(num_clients)
        self.fraction = fraction
        self.larger_is_better = larger_is_better

    def _statistic(self, values: Tensor) -> Tensor:
        return F.worst_fraction(values, self.fraction, self.larger_is_better)


class BestFraction(WorstFraction):
    r"""Mean of the clients' averages over the best clients, :math:`k = \max(1, \operatorname{round}(fraction \, N))`.

    .. math::
        \frac1k \sum_{i > N - k} a_{(i)}

    with the averages sorted from the worst.

    Arguments are those of :class:`WorstFraction`.

    Example:
        >>> from fl_lightning.metrics import BestFraction
        >>> metric = BestFraction(num_clients=4, fraction=0.25)
        >>> metric.update(torch.tensor([0.9, 0.2, 0.5]), torch.tensor([0, 1, 3]))
        >>> metric.compute()
        tensor(0.9000, dtype=torch.float64)
    """

    def _statistic(self, values: Tensor) -> Tensor:
        return F.best_fraction(values, self.fraction, self.larger_is_better)
