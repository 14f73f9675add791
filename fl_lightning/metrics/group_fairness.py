# SPDX-License-Identifier: Apache-2.0
"""Stateful fairness between groups of people, per client and pooled.

Each is a ``torchmetrics.Metric`` of counts per client and group, which add up over batches and over processes. The
functions of the same names are in :mod:`fl_lightning.metrics.functional`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.arguments import Bounds, checked
from fl_lightning.metrics.group_frame import (
    ODDS,
    OPPORTUNITY,
    PARITY,
    GroupFrame,
    Method,
    client_numbers,
    group_counts,
    rates,
)

Compare = Literal["difference", "ratio", "signed"]
"""Largest less smallest, smallest by largest, or group 1 less group 0."""


class _GroupRates(Metric):
    is_differentiable = False
    full_state_update = False
    _given: tuple[int | None, ...]

    positive: Tensor
    totals: Tensor

    @checked(num_groups=Bounds(2), num_clients=Bounds(1))
    def __init__(
        self,
        num_groups: int = 2,
        compare: Compare = "difference",
        method: Method = "between_groups",
        num_clients: int = 1,
    ) -> None:
        super().__init__()
        if compare == "signed" and num_groups != 2:
            raise ValueError(f"compare='signed' of {type(self).__name__} needs num_groups=2, found {num_groups}")
        self.num_groups, self.compare, self.method, self.num_clients = num_groups, compare, method, num_clients
        for name in ("positive", "totals"):
            counts = torch.zeros(num_clients, len(self._given), num_groups, dtype=torch.int64)
            self.add_state(name, counts, dist_reduce_fx="sum")

    @property
    def higher_is_better(self) -> bool | None:  # type: ignore[override]  # torchmetrics has a constant
        """Whether large values are fair: those of ratios are. Signed ones are fair near 0."""
        return None if self.compare == "signed" else self.compare == "ratio"

    def frame(self) -> GroupFrame:
        """The rates of the groups over all clients' samples taken together: ``by_group [G]``.

        Of :class:`EqualizedOdds`, true and false positive rates ``[2, G]``.
        """
        return self._rates(self.positive.sum(0), self.totals.sum(0))

    def client_frames(self) -> GroupFrame:
        """The rates of the groups at each client: ``by_group [num_clients, G]``, or ``[num_clients, 2, G]``."""
        return self._rates(self.positive, self.totals)

    def client_values(self) -> Tensor:
        """``[num_clients]``; NaN for clients at which fewer than two groups have the samples that count."""
        return self._compared(self.client_frames())

    def pooled(self) -> Tensor:
        """The value over all clients' samples taken together; it can be fair where no client's is."""
        return self._compared(self.frame())

    def compute(self) -> Tensor:
        """The value of the client that is treated most unequally; NaN if no client has one."""
        values = self.client_values()
        defined = values[~values.isnan()]
        if defined.numel() == 0:
            return values[0]
        return defined.min() if self.compare == "ratio" else defined[defined.abs().argmax()]

    def _count(self, predictions: Tensor, labels: Tensor | None, groups: Tensor, client_ids: Tensor | int) -> None:
        ids = client_numbers(client_ids, predictions, self.num_clients)
        counts = group_counts(predictions, labels, groups, self._given, self.num_groups, ids, self.num_clients)
        self.positive += counts[0].to(self.positive.device)
        self.totals += counts[1].to(self.totals.device)

    def _rates(self, positive: Tensor, totals: Tensor) -> GroupFrame:
        return rates(positive[..., 0, :], totals[..., 0, :])

    def _compared(self, frame: GroupFrame) -> Tensor:
        if self.compare == "signed":
            return frame.by_group[..., 1] - frame.by_group[..., 0]
        return frame.difference(self.method) if self.compare == "difference" else frame.ratio(self.method)


class DemographicParity(_GroupRates):
    r"""Compares how often class 1 is predicted in each group.

    .. math::
        \max_g P(\hat Y = 1 \mid A = g) - \min_g P(\hat Y = 1 \mid A = g)

    With one client it is the value of all samples. Logged with ``self.log`` it is that as well, and
    :class:`fl_lightning.FederatedStrategy` gives each client's own beside it.

    Args:
        num_groups: how many groups there are; their numbers run from 0.
        compare: the difference, the ratio, or with two groups the rate of group 1 less that of group 0.
        method: compare groups with each other or with all people.
        num_clients: how many clients there are; ids run from 0.

    Example:
        >>> from fl_lightning.metrics import DemographicParity
        >>> metric = DemographicParity(num_clients=2)
        >>> metric.update(torch.tensor([1, 0, 1, 1]), torch.tensor([0, 0, 1, 1]), client_ids=0)
        >>> metric.update(torch.tensor([1, 0]), torch.tensor([0, 1]), client_ids=1)
        >>> metric.client_values(), metric.pooled()
        (tensor([0.5000, 1.0000], dtype=torch.float64), tensor(0., dtype=torch.float64))
    """

    _given = PARITY

    def update(self, predictions: Tensor, groups: Tensor, client_ids: Tensor | int = 0) -> None:
        """Counts samples.

        Args:
            predictions: ``[B]``, 0 or 1.
            groups: ``[B]`` integers in ``[0, num_groups)``.
            client_ids: ``[B]`` integers in ``[0, num_clients)``, or one id for all.

        Raises:
            ValueError: shapes differ, or a value is out of range.
        """
        self._count(predictions, None, groups, client_ids)


class EqualOpportunity(_GroupRates):
    r"""Compares the true positive rates of the groups.

    .. math::
        \max_g P(\hat Y = 1 \mid A = g, Y = 1) - \min_g P(\hat Y = 1 \mid A = g, Y = 1)

    Arguments are those of :class:`DemographicParity`; here only samples with label 1 count. A group that has none is
    left out, where fairlearn counts its rate as 0.

    Example:
        >>> from fl_lightning.metrics import EqualOpportunity
        >>> metric = EqualOpportunity()
        >>> metric.update(torch.tensor([1, 0, 1, 1]), torch.tensor([1, 1, 1, 0]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.5000, dtype=torch.float64)
    """

    _given: tuple[int | None, ...] = OPPORTUNITY

    def update(self, predictions: Tensor, labels: Tensor, groups: Tensor, client_ids: Tensor | int = 0) -> None:
        """Counts samples as :meth:`DemographicParity.update` does; ``labels``: ``[B]``, 0 or 1."""
        self._count(predictions, labels, groups, client_ids)


class EqualizedOdds(EqualOpportunity):
    r"""Compares the true and the false positive rates of the groups, and takes the one that is less equal.

    .. math::
        \max_{y \in \{0, 1\}} \left( \max_g P(\hat Y = 1 \mid A = g, Y = y)
        - \min_g P(\hat Y = 1 \mid A = g, Y = y) \right)

    Other arguments are those of :class:`DemographicParity`. A rate whose comparison is undefined does not count.

    Args:
        compare: the difference or the ratio.
        agg: the less equal of the two rates, or the mean of the two comparisons.

    Example:
        >>> from fl_lightning.metrics import EqualizedOdds
        >>> metric = EqualizedOdds()
        >>> metric.update(torch.tensor([1, 0, 1, 1]), torch.tensor([1, 0, 1, 0]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute(), metric.frame().by_group
        (tensor(1., dtype=torch.float64), tensor([[1., 1.],
                [0., 1.]], dtype=torch.float64))
    """

    _given = ODDS

    @checked(num_groups=Bounds(2), num_clients=Bounds(1))
    def __init__(
        self,
        num_groups: int = 2,
        compare: Literal["difference", "ratio"] = "difference",
        method: Method = "between_groups",
        num_clients: int = 1,
        agg: Literal["worst_case", "mean"] = "worst_case",
    ) -> None:
        super().__init__(num_groups, compare, method, num_clients)
        self.agg = agg

    def _rates(self, positive: Tensor, totals: Tensor) -> GroupFrame:
        return rates(positive, totals)

    def _compared(self, frame: GroupFrame) -> Tensor:
        both = super()._compared(frame)
        if self.agg == "mean":
            return both.nanmean(-1)
        ends = GroupFrame(both, both[..., 0])
        return ends.group_max() if self.compare == "difference" else ends.group_min()
