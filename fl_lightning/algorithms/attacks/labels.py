# SPDX-License-Identifier: Apache-2.0
"""Clients that train on wrong labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms.attacks.base import Attack
from fl_lightning.arguments import Bounds, checked


@checked(clients=Bounds(0), num_classes=Bounds(2))
@dataclass(frozen=True)
class LabelFlip(Attack):
    """Label ``y`` becomes ``num_classes - 1 - y``, in training and where the loss is measured.

    Labels below 0, which losses ignore, stay.

    Minghong Fang, Xiaoyu Cao, Jinyuan Jia, Neil Zhenqiang Gong: Local Model Poisoning Attacks to Byzantine-Robust
    Federated Learning. USENIX Security 2020, section 5.1. https://arxiv.org/abs/1911.11815

    Attributes:
        clients: ids of the dishonest clients.
        num_classes: number of classes.
        labels: where a batch holds its labels: a place of a tuple or list, or a key of a dictionary. They are integers.

    Raises:
        ValueError: ``num_classes`` is below 2.
    """

    clients: Sequence[int]
    num_classes: int
    labels: int | str = -1

    def change_batch(self, batch: Any) -> Any:
        """Flips the labels.

        Raises:
            TypeError: the batch has no labels at this place.
            ValueError: a label is not below ``num_classes``, or its type does not hold what becomes of it.
        """
        return _relabelled(batch, self, self._flipped)

    def _flipped(self, labels: Tensor) -> Tensor:
        largest = int(labels.max()) if labels.numel() else 0
        if largest >= self.num_classes:
            found = f"{self.num_classes} and a label {largest}"
            raise ValueError(f"num_classes of LabelFlip must be above all labels, found {found}")
        return torch.where(labels < 0, labels, self.num_classes - 1 - labels)


@checked(clients=Bounds(0), source=Bounds(0), target=Bounds(0), factor=Bounds(above=0))
@dataclass(frozen=True)
class TargetedScaling(Attack):
    """Model replacement: the client learns to take one class for another, and enlarges its update.

    With ``factor`` as large as the number of clients that a mean is taken over, that mean becomes the client's own
    model where the others hardly move.

    Eugene Bagdasaryan, Andreas Veit, Yiqing Hua, Deborah Estrin, Vitaly Shmatikov: How To Backdoor Federated Learning.
    AISTATS 2020, section 4.2, equation 3. https://arxiv.org/abs/1807.00459

    Attributes:
        clients: ids of the dishonest clients.
        source: the class whose samples get another label.
        target: that label.
        factor: what the update is multiplied by, the paper's gamma.
        labels: as in :class:`LabelFlip`.

    Raises:
        ValueError: an argument is out of range.
    """

    clients: Sequence[int]
    source: int
    target: int
    factor: float = 10.0
    labels: int | str = -1

    def change_batch(self, batch: Any) -> Any:
        """Changes the labels of one class.

        Raises:
            TypeError: the batch has no labels at this place.
            ValueError: the type of the labels does not hold ``target``.
        """
        return _relabelled(batch, self, lambda y: torch.where(y == self.source, self.target, y))

    def replace(self, update: Tensor, params: Tensor, seed: int) -> None:
        """Multiplies the update."""
        update.mul_(self.factor)


def _relabelled(batch: Any, attack: LabelFlip | TargetedScaling, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with other labels, as a new object."""
    where, name = attack.labels, f"labels={attack.labels!r} of {type(attack).__name__}"
    parts: Any = dict(batch) if isinstance(batch, Mapping) else list(batch) if isinstance(batch, (tuple, list)) else {}
    try:
        labels = parts[where]
    except (KeyError, IndexError, TypeError):
        labels = None
    other = isinstance(labels, Tensor) and (labels.is_floating_point() or labels.is_complex())
    if not isinstance(labels, Tensor) or other or labels.dtype is torch.bool:
        found = f"a tensor of {labels.dtype}" if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(
            f"{name} must say where batches hold a tensor of integers, found {found} in a {type(batch).__name__}"
        )
    # In wide numbers: in one byte, 299 would silently be 43.
    changed = change(labels.long())
    parts[where] = narrow = changed.to(labels.dtype)
    if not torch.equal(narrow.long(), changed):
        lost = int(changed[narrow.long() != changed][0])
        raise ValueError(
            f"{name} must say where batches hold integers that can be the new labels, found {labels.dtype} and the "
            f"new label {lost}"
        )
    if isinstance(batch, tuple):
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return parts
