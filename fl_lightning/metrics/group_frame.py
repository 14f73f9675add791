# SPDX-License-Identifier: Apache-2.0
"""A metric of each group of people, compared between the groups; and the three rates that fairness usually compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.arguments import Bounds, checked

Method = Literal["between_groups", "to_overall"]
"""Whether groups are compared with each other or with all people."""

PARITY, OPPORTUNITY, ODDS = (None,), (1,), (1, 0)
"""The labels whose samples each rate is taken over; ``None``: all samples."""


@checked()
@dataclass(frozen=True)
class GroupFrame:
    """A metric of each group and of all people, with the names of fairlearn's ``MetricFrame``.

    Groups without a value are left out. Where fewer than two groups have one, nothing can be compared, and difference
    and ratio are NaN; fairlearn gives 0 and 1 there.

    Attributes:
        by_group: ``[..., G]`` values of the groups; NaN for a group without the samples that the metric needs.
        overall: ``[...]`` value over all people.

    Example:
        >>> frame = GroupFrame(by_group=torch.tensor([0.5, 0.2, 0.4]), overall=torch.tensor(0.4))
        >>> frame.difference(), frame.ratio(), frame.difference("to_overall")
        (tensor(0.3000), tensor(0.4000), tensor(0.2000))
    """

    by_group: Tensor
    overall: Tensor

    def group_min(self) -> Tensor:
        """``[...]`` smallest value of a group."""
        return self._compared(self.by_group.masked_fill(self.by_group.isnan(), torch.inf).amin(-1), 1)

    def group_max(self) -> Tensor:
        """``[...]`` largest value of a group."""
        return self._compared(self.by_group.masked_fill(self.by_group.isnan(), -torch.inf).amax(-1), 1)

    @checked()
    def difference(self, method: Method = "between_groups") -> Tensor:
        """Largest distance ``[...]``; 0 is the fairest.

        Args:
            method: between any two groups, or from a group to ``overall``.
        """
        if method == "between_groups":
            return self._compared(self.group_max() - self.group_min())
        distances = GroupFrame((self.by_group - self.overall.unsqueeze(-1)).abs(), self.overall)
        return self._compared(distances.group_max())

    @checked()
    def ratio(self, method: Method = "between_groups") -> Tensor:
        """Smallest ratio ``[...]``, the smaller value divided by the larger one; 1 is the fairest.

        NaN where all values are 0, as in fairlearn.

        Args:
            method: between any two groups, or of a group and ``overall``.
        """
        if method == "between_groups":
            return self._compared(self.group_min() / self.group_max())
        ratios = self.by_group / self.overall.unsqueeze(-1)
        return self._compared(GroupFrame(torch.where(ratios > 1, 1 / ratios, ratios), self.overall).group_min())

    def _compared(self, values: Tensor, least: int = 2) -> Tensor:
        """NaN where fewer groups than that have a value."""
        return values.masked_fill((~self.by_group.isnan()).sum(-1) < least, torch.nan)


@checked(num_groups=Bounds(2))
def demographic_parity(predictions: Tensor, groups: Tensor, num_groups: int | None = None) -> GroupFrame:
    r"""How often class 1 is predicted in each group, :math:`P(\hat Y = 1 \mid A = g)`.

    Args:
        predictions: ``[B]``, 0 or 1.
        groups: ``[B]`` integers from 0.
        num_groups: how many groups there are; by default those up to the largest number.

    Returns:
        Rates ``[G]``, float64 (float32 on devices that lack float64).

    Raises:
        ValueError: shapes differ, or a value is out of range.

    Example:
        >>> demographic_parity(torch.tensor([1, 0, 1, 1]), torch.tensor([0, 0, 1, 1])).difference()
        tensor(0.5000, dtype=torch.float64)
    """
    return _frame(predictions, None, groups, num_groups, PARITY, 0)


@checked(num_groups=Bounds(2))
def equal_opportunity(predictions: Tensor, labels: Tensor, groups: Tensor, num_groups: int | None = None) -> GroupFrame:
    r"""True positive rate of each group, :math:`P(\hat Y = 1 \mid A = g, Y = 1)`.

    As :func:`demographic_parity`, with ``labels`` ``[B]`` of 0 and 1. A group without a sample of label 1 has no rate:
    NaN. fairlearn counts it as 0.

    Example:
        >>> predictions, labels, groups = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0], [0, 0, 1, 1]])
        >>> equal_opportunity(predictions, labels, groups).ratio()
        tensor(0.5000, dtype=torch.float64)
    """
    return _frame(predictions, labels, groups, num_groups, OPPORTUNITY, 0)


@checked(num_groups=Bounds(2))
def equalized_odds(predictions: Tensor, labels: Tensor, groups: Tensor, num_groups: int | None = None) -> GroupFrame:
    """True and false positive rates ``[2, G]`` of each group.

    The first row is as in :func:`equal_opportunity`, the second is for the samples with label 0.

    Example:
        >>> frame = equalized_odds(torch.tensor([1, 0, 1, 1]), torch.tensor([1, 0, 1, 0]), torch.tensor([0, 0, 1, 1]))
        >>> frame.difference()
        tensor([0., 1.], dtype=torch.float64)
    """
    return _frame(predictions, labels, groups, num_groups, ODDS, slice(None))


def group_counts(
    predictions: Tensor,
    labels: Tensor | None,
    groups: Tensor,
    given: tuple[int | None, ...],
    num_groups: int,
    client_ids: Tensor | None = None,
    num_clients: int = 1,
) -> tuple[Tensor, Tensor]:
    """Samples predicted as class 1, and samples, for each label in ``given``: two int64 ``[N, len(given), G]``."""
    ones = _binary("predictions", predictions, predictions)
    truth = torch.zeros_like(ones) if labels is None else _binary("labels", labels, predictions)
    members = group_numbers(_vector("groups", groups, predictions), num_groups)
    cells = members if client_ids is None else num_groups * client_ids + members
    positive, totals = [], []
    for label in given:
        counted = torch.ones_like(ones) if label is None else truth == bool(label)
        totals.append(torch.bincount(cells[counted], minlength=num_groups * num_clients))
        positive.append(torch.bincount(cells[counted & ones], minlength=num_groups * num_clients))
    shape = (len(given), num_clients, num_groups)
    return torch.stack(positive).view(shape).transpose(0, 1), torch.stack(totals).view(shape).transpose(0, 1)


def rates(positive: Tensor, totals: Tensor) -> GroupFrame:
    """Shares ``[..., G]`` of the groups, NaN where one is empty, and of all people ``[...]``."""
    wide = torch.float32 if positive.device.type == "mps" else torch.float64
    return GroupFrame(positive.to(wide) / totals.to(wide), positive.sum(-1).to(wide) / totals.sum(-1).to(wide))


def client_numbers(client_ids: Tensor | int, like: Tensor, num_clients: int) -> Tensor:
    """The client of each of ``[B]`` values, int64 where these are, from one id or as many."""
    ids = torch.as_tensor(client_ids, device=like.device)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"client_ids must be integers, found dtype {ids.dtype}")
    ids = ids.expand_as(like) if ids.dim() == 0 else ids.reshape(-1)
    if ids.shape != like.shape:
        raise ValueError(f"client_ids must be one id, or one per value, {like.numel()}, found {len(ids)}")
    outside = (ids < 0) | (ids >= num_clients)
    if bool(outside.any()):
        found = sorted(set(ids[outside].tolist()))[:10]
        raise ValueError(f"client_ids must be in [0, {num_clients}), found {found}")
    return ids.long()


def group_numbers(groups: Tensor, num_groups: int) -> Tensor:
    """The groups as int64."""
    numbers = groups.long()
    if not bool(((numbers == groups) & (numbers >= 0) & (numbers < num_groups)).all()):
        found = sorted(set(groups.tolist()))[:10]
        raise ValueError(f"groups must be integers from 0 to below num_groups={num_groups}, found {found}")
    return numbers


def _frame(
    predictions: Tensor,
    labels: Tensor | None,
    groups: Tensor,
    num_groups: int | None,
    given: tuple[int | None, ...],
    which: int | slice,
) -> GroupFrame:
    if num_groups is None:
        num_groups = max(2, int(groups.max()) + 1) if groups.numel() else 2
    positive, totals = group_counts(predictions, labels, groups, given, num_groups)
    return rates(positive[0, which], totals[0, which])


def _vector(name: str, values: Tensor, like: Tensor) -> Tensor:
    if values.dim() != 1 or values.shape != like.shape:
        raise ValueError(
            f"{name} must be a vector of one value per prediction {list(like.shape)}, found {list(values.shape)}"
        )
    return values


def _binary(name: str, values: Tensor, like: Tensor) -> Tensor:
    ones = _vector(name, values, like) == 1
    if not bool((ones | (values == 0)).all()):
        raise ValueError(f"{name} must be 0 or 1, found {sorted(set(values.tolist()))[:10]}")
    return ones
