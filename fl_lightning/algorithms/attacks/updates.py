# SPDX-License-Identifier: Apache-2.0
"""Clients that train honestly, and send another update, or other numbers by which methods weigh them.

Pan, Li, Chen, Li, Zheng: FedMDFG (AAAI 2023), section 4.4: random, enlarged and zero updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.algorithms.attacks.base import Attack
from fl_lightning.arguments import Bounds, check_unused, checked


def _noise(like: Tensor, seed: int) -> Tensor:
    """Standard normal numbers, drawn on the CPU, so that they are the same on every device."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


@checked(clients=Bounds(0), std=Bounds(above=0))
@dataclass(frozen=True)
class RandomUpdates(Attack):
    """A1: independent normal numbers with mean zero.

    The paper states no scale, and its published code has two. With ``match_norm`` the noise has the norm of the honest
    update. Otherwise each number has the standard deviation ``std``, which may be far larger than an honest update.

    Attributes:
        clients: ids of the dishonest clients.
        std: standard deviation of each number.
        match_norm: scale the noise to the norm of the honest update, in place of ``std``.

    Raises:
        ValueError: ``std`` is not positive and finite.
    """

    clients: Sequence[int]
    std: float = 1.0
    match_norm: bool = False

    def __post_init__(self) -> None:
        if self.match_norm:
            check_unused("std of RandomUpdates", self.std, 1.0, "with match_norm=True")

    def replace(self, update: Tensor, params: Tensor, seed: int) -> None:
        """Puts the noise in its place."""
        noise = _noise(update, seed)
        scale = float(update.cpu().double().norm()) / float(noise.norm()) if self.match_norm else self.std
        update.copy_(noise.mul_(scale))


@checked(clients=Bounds(0), std=Bounds(0))
@dataclass(frozen=True)
class RandomModels(Attack):
    """A1 where models are sent: all parameters are independent normal numbers with mean zero.

    The paper describes A1 this way for methods that send models, and its published code does this. The update then
    removes the global model and adds noise. ``std = 0`` sends a model of zeros.

    Attributes:
        clients: ids of the dishonest clients.
        std: standard deviation of each parameter.

    Raises:
        ValueError: ``std`` is negative or not finite.
    """

    clients: Sequence[int]
    std: float = 1.0

    def replace(self, update: Tensor, params: Tensor, seed: int) -> None:
        """Puts the way from the model to the global one in its place."""
        model = _noise(update, seed).mul_(self.std)
        update.copy_(params - model.to(params))


@checked(clients=Bounds(0))
@dataclass(frozen=True)
class ScaledUpdates(Attack):
    """A2: the honest update, enlarged.

    Attributes:
        clients: ids of the dishonest clients.
        factor: by how much; the paper's is 100.

    Raises:
        ValueError: ``factor`` is not finite.
    """

    clients: Sequence[int]
    factor: float = 100.0

    def replace(self, update: Tensor, params: Tensor, seed: int) -> None:
        """Multiplies the update."""
        update.mul_(self.factor)


@checked(clients=Bounds(0))
@dataclass(frozen=True)
class ZeroUpdates(Attack):
    """A3: nothing: the client sends the global model back.

    Attributes:
        clients: ids of the dishonest clients.
    """

    clients: Sequence[int]

    def replace(self, update: Tensor, params: Tensor, seed: int) -> None:
        """Fills the update with zeros."""
        update.zero_()


@checked(clients=Bounds(0), loss_factor=Bounds(0), accuracy=Bounds(0, 1))
@dataclass(frozen=True)
class FalseReports(Attack):
    """The loss times a factor, and another accuracy; the update is honest.

    A client that reports a large loss or a low accuracy gains weight with every method that helps clients which fare
    badly. Methods that ask for neither do not notice this attack.

    Attributes:
        clients: ids of the dishonest clients.
        loss_factor: what a loss at given parameters is multiplied by.
        accuracy: what is reported as accuracy; ``None``: the truth.

    Raises:
        ValueError: ``loss_factor`` is negative or not finite, or ``accuracy`` is no share.
    """

    clients: Sequence[int]
    loss_factor: float = 10.0
    accuracy: float | None = 0.0

    def report(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Changes both numbers."""
        told = dict(measured)
        if "loss" in told:
            told["loss"] *= self.loss_factor
        if "accuracy" in told and self.accuracy is not None:
            told["accuracy"] = self.accuracy
        return told
