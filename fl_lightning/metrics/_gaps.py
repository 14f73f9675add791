# SPDX-License-Identifier: Apache-2.0
"""Signed gaps between two groups of people, as pure functions and from counts."""

from __future__ import annotations

import torch
from torch import Tensor


def demographic_parity_gap(predictions: Tensor, groups: Tensor) -> Tensor:
    r"""How much more often class 1 is predicted in group 1 than in group 0; its absolute value is the disparity.

    .. math::
        P(\hat Y = 1 \mid A = 1) - P(\hat Y = 1 \mid A = 0)

    Source: FCFL (NeurIPS 2021), equation 2.

    Args:
        predictions: ``[B]``, 0 or 1.
        groups: ``[B]``, 0 or 1.

    Returns:
        A float64 scalar (float32 on devices that lack float64); NaN if a group has no sample.

    Raises:
        ValueError: shapes differ, or a value is neither 0 nor 1.

    Example:
        >>> demographic_parity_gap(torch.tensor([1, 0, 1, 1]), torch.tensor([0, 0, 1, 1]))
        tensor(0.5000, dtype=torch.float64)
    """
    return gaps(*group_counts(predictions, groups, None, None, 1))[0]


def equal_opportunity_gap(predictions: Tensor, labels: Tensor, groups: Tensor) -> Tensor:
    r"""The same among the samples with label 1: the difference of the true positive rates.

    .. math::
        P(\hat Y = 1 \mid A = 1, Y = 1) - P(\hat Y = 1 \mid A = 0, Y = 1)

    The false negative rates differ by as much. Source: FCFL (NeurIPS 2021), equation 2.

    Args:
        predictions: ``[B]``, 0 or 1.
        labels: ``[B]``, 0 or 1.
        groups: ``[B]``, 0 or 1.

    Returns:
        A float64 scalar (float32 on devices that lack float64); NaN if a group has no sample with label 1.

    Raises:
        ValueError: shapes differ, or a value is neither 0 nor 1.

    Example:
        >>> equal_opportunity_gap(torch.tensor([1, 0, 1, 1]), torch.tensor([1, 1, 1, 0]), torch.tensor([0, 0, 1, 1]))
        tensor(0.5000, dtype=torch.float64)
    """
    return gaps(*group_counts(predictions, groups, labels, None, 1))[0]


def group_counts(
    predictions: Tensor, groups: Tensor, labels: Tensor | None, client_ids: Tensor | None, num_clients: int
) -> tuple[Tensor, Tensor]:
    """Samples predicted as class 1, and samples, per client and group: two int64 matrices ``[num_clients, 2]``.

    With ``labels`` only samples with label 1 count; without ``client_ids`` all belong to client 0.
    """
    ones = _binary("predictions", predictions, predictions)
    members = _binary("groups", groups, predictions)
    counted = torch.ones_like(ones) if labels is None else _binary("labels", labels, predictions)
    cells = members.long() if client_ids is None else 2 * client_ids.reshape(-1) + members.long()
    totals = torch.bincount(cells[counted], minlength=2 * num_clients)
    positive = torch.bincount(cells[counted & ones], minlength=2 * num_clients)
    return positive.view(num_clients, 2), totals.view(num_clients, 2)


def gaps(positive: Tensor, totals: Tensor) -> Tensor:
    """Share of group 1 minus share of group 0 ``[N]``, NaN where a group is empty."""
    wide = torch.float32 if positive.device.type == "mps" else torch.float64
    shares = positive.to(wide) / totals.to(wide)
    return shares[:, 1] - shares[:, 0]


def _binary(name: str, values: Tensor, like: Tensor) -> Tensor:
    if values.dim() != 1 or values.shape != like.shape:
        raise ValueError(
            f"{name} must be a vector of one value per prediction {list(like.shape)}, found {list(values.shape)}"
        )
    ones = values == 1
    if not bool((ones | (values == 0)).all()):
        raise ValueError(f"{name} must be 0 or 1, found {sorted(set(values.tolist()))[:10]}")
    return ones
