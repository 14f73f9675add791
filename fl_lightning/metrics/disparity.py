# SPDX-License-Identifier: Apache-2.0
"""Stateful disparities between two groups of people, per client and pooled.

Each is a ``torchmetrics.Metric`` of counts per client and group, which add up over batches and, under DDP, over
processes. The functions of the same meaning are in :mod:`fl_lightning.metrics.functional`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.arguments import Bounds, checked
from fl_lightning.metrics._gaps import gaps, group_counts


class _Gap(Metric):
    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    positive: Tensor
    totals: Tensor

    @checked(num_clients=Bounds(1))
    def __init__(self, num_clients: int = 1, signed: bool = False) -> None:
        super().__init__()
        self.num_clients, self.signed = num_clients, signed
        for name in ("positive", "totals"):
            self.add_state(name, torch.zeros(num_clients, 2, dtype=torch.int64), dist_reduce_fx="sum")

    def _count(self, predictions: Tensor, groups: Tensor, labels: Tensor | None, client_ids: Tensor | int) -> None:
        ids = torch.as_tensor(client_ids, device=predictions.device)
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(f"client_ids must be integers, found dtype {ids.dtype}")
        ids = ids.expand_as(predictions) if ids.dim() == 0 else ids
        if ids.shape != predictions.shape:
            raise ValueError(f"client_ids must be one id, or one per prediction, found {list(ids.shape)}")
        if bool(((ids < 0) | (ids >= self.num_clients)).any()):
            raise ValueError(f"client_ids must be in [0, {self.num_clients}), found {sorted(set(ids.tolist()))[:10]}")
        positive, totals = group_counts(predictions, groups, labels, ids, self.num_clients)
        self.positive += positive.to(self.positive.device)
        self.totals += totals.to(self.totals.device)

    def client_values(self) -> Tensor:
        """``[num_clients]`` signed gaps, group 1 minus group 0; NaN for clients that lack one of the groups."""
        return gaps(self.positive, self.totals)

    def pooled(self) -> Tensor:
        """The signed gap over all clients' samples taken together; it can be small where every client's is large."""
        return gaps(self.positive.sum(0, keepdim=True), self.totals.sum(0, keepdim=True))[0]

    def compute(self) -> Tensor:
        """The gap of the client that is treated most unequally; NaN if no client has both groups."""
        values = self.client_values()
        kept = values[~values.isnan()]
        if kept.numel() == 0:
            return values[0]
        worst = kept[kept.abs().argmax()]
        return worst if self.signed else worst.abs()


class DemographicParityGap(_Gap):
    r"""Largest difference over the clients in how often class 1 is predicted in the two groups.

    .. math::
        \max_k \lvert P_k(\hat Y = 1 \mid A = 1) - P_k(\hat Y = 1 \mid A = 0) \rvert

    FCFL (NeurIPS 2021, equation 2) bounds it by a budget. With one client it is the gap of all samples. Logged with
    ``self.log`` in validation or test it is that as well, and :class:`fl_lightning.FederatedStrategy` gives each
    client's own beside it.

    Args:
        num_clients: how many clients there are; ids run from 0.
        signed: keep the sign, group 1 minus group 0.

    Example:
        >>> from fl_lightning.metrics import DemographicParityGap
        >>> metric = DemographicParityGap(num_clients=2)
        >>> metric.update(torch.tensor([1, 0, 1, 1]), torch.tensor([0, 0, 1, 1]), client_ids=0)
        >>> metric.update(torch.tensor([1, 0]), torch.tensor([0, 1]), client_ids=1)
        >>> metric.compute(), metric.client_values()
        (tensor(1., dtype=torch.float64), tensor([ 0.5000, -1.0000], dtype=torch.float64))
    """

    def update(self, predictions: Tensor, groups: Tensor, client_ids: Tensor | int = 0) -> None:
        """Counts samples.

        Args:
            predictions: ``[B]``, 0 or 1.
            groups: ``[B]``, 0 or 1.
            client_ids: ``[B]`` integers in ``[0, num_clients)``, or one id for all.

        Raises:
            ValueError: shapes differ, a value is neither 0 nor 1, or an id is out of range or no integer.
        """
        self._count(predictions, groups, None, client_ids)


class EqualOpportunityGap(_Gap):
    r"""Largest difference over the clients between the true positive rates of the two groups.

    .. math::
        \max_k \lvert P_k(\hat Y = 1 \mid A = 1, Y = 1) - P_k(\hat Y = 1 \mid A = 0, Y = 1) \rvert

    See :class:`DemographicParityGap`; here only samples with label 1 count.

    Args:
        num_clients: how many clients there are; ids run from 0.
        signed: keep the sign, group 1 minus group 0.

    Example:
        >>> from fl_lightning.metrics import EqualOpportunityGap
        >>> metric = EqualOpportunityGap()
        >>> metric.update(torch.tensor([1, 0, 1, 1]), torch.tensor([1, 1, 1, 0]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.5000, dtype=torch.float64)
    """

    def update(self, predictions: Tensor, labels: Tensor, groups: Tensor, client_ids: Tensor | int = 0) -> None:
        """Counts samples.

        Args:
            predictions: ``[B]``, 0 or 1.
            labels: ``[B]``, 0 or 1.
            groups: ``[B]``, 0 or 1.
            client_ids: ``[B]`` integers in ``[0, num_clients)``, or one id for all.

        Raises:
            ValueError: shapes differ, a value is neither 0 nor 1, or an id is out of range or no integer.
        """
        self._count(predictions, groups, labels, client_ids)
