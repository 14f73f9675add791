# SPDX-License-Identifier: Apache-2.0
"""Any metric for each group of people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import ModuleList
from torchmetrics import Metric
from torchmetrics.wrappers.abstract import WrapperMetric

from fl_lightning.arguments import Bounds, checked
from fl_lightning.metrics.group_frame import GroupFrame, Method, group_numbers


class ByGroup(WrapperMetric):
    """Computes a metric for each group of people and for all of them, and compares the groups.

    fairlearn's ``MetricFrame`` with a metric of torchmetrics. A group without samples has no value. Where samples are
    not enough for the metric, an AUROC without positives for instance, its own rule applies: torchmetrics warns and
    gives 0. In the validation of a :class:`fl_lightning.FederatedStrategy` such a group has no value either.

    Args:
        metric: a metric that gives one number; its copies see the samples of one group each.
        num_groups: how many groups there are; their numbers run from 0.
        compare: the difference or the ratio.
        method: compare groups with each other or with all people.

    Example:
        >>> from torchmetrics.classification import BinaryAccuracy
        >>> from fl_lightning.metrics import ByGroup
        >>> metric = ByGroup(BinaryAccuracy(), num_groups=3)
        >>> metric.update(torch.tensor([1, 0, 1, 1]), torch.tensor([1, 1, 1, 1]), groups=torch.tensor([0, 0, 1, 1]))
        >>> metric.compute(), metric.frame().by_group
        (tensor(0.5000), tensor([0.5000, 1.0000,    nan]))
    """

    full_state_update = False

    @checked(num_groups=Bounds(2))
    def __init__(
        self,
        metric: Metric,
        num_groups: int = 2,
        compare: Literal["difference", "ratio"] = "difference",
        method: Method = "between_groups",
    ) -> None:
        super().__init__()
        self.num_groups, self.compare, self.method = num_groups, compare, method
        self.overall = metric.clone()
        self.groups = ModuleList(metric.clone() for _ in range(num_groups))
        for part in self._parts():
            part.reset()

    @property
    def higher_is_better(self) -> bool:  # type: ignore[override]  # torchmetrics has a constant
        """Whether large values are fair: those of ratios are."""
        return self.compare == "ratio"

    def update(self, *values: Tensor, groups: Tensor) -> None:
        """Gives samples to the metric.

        Args:
            values: what the metric takes, each with the samples along its first dimension.
            groups: ``[B]`` integers in ``[0, num_groups)``.

        Raises:
            ValueError: lengths differ, or a group is out of range.
        """
        for part, chosen in self._shares(values, groups):
            part.update(*chosen)

    def forward(self, *values: Tensor, groups: Tensor) -> Tensor:
        """Gives samples to the metric, and compares the groups among them alone."""
        own = {part: part(*chosen) for part, chosen in self._shares(values, groups)}
        nan = torch.full_like(own[self.overall], torch.nan)
        by_group = torch.stack([own.get(part, nan) for part in self._parts()[1:]])
        return self._compared(GroupFrame(by_group, own[self.overall]))

    def frame(self) -> GroupFrame:
        """``by_group [G]`` and ``overall``."""
        overall, *by_group = (
            part.compute() if part.update_called else torch.tensor(torch.nan, device=part.device)
            for part in self._parts()
        )
        return GroupFrame(torch.stack(by_group), overall)

    def compute(self) -> Tensor:
        """The comparison of the groups; NaN if fewer than two have samples."""
        return self._compared(self.frame())

    def reset(self) -> None:
        """Forgets all samples."""
        super().reset()
        for part in self._parts():
            part.reset()

    def _parts(self) -> list[Any]:
        return [self.overall, *self.groups]

    def _shares(self, values: tuple[Tensor, ...], groups: Tensor) -> Iterator[tuple[Metric, list[Tensor]]]:
        members = group_numbers(groups, self.num_groups)
        if groups.dim() != 1 or any(len(value) != len(groups) for value in values):
            shapes = [list(value.shape) for value in values]
            raise ValueError(f"groups must be a vector of one value per sample {shapes}, found {list(groups.shape)}")
        yield self.overall, list(values)
        for group, part in enumerate(self._parts()[1:]):
            mask = members == group
            if bool(mask.any()):
                yield part, [value[mask] for value in values]

    def _compared(self, frame: GroupFrame) -> Tensor:
        return frame.difference(self.method) if self.compare == "difference" else frame.ratio(self.method)
