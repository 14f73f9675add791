# SPDX-License-Identifier: Apache-2.0
"""What a server rule may know about one round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite
from typing import Any

import torch
from torch import Tensor

from fl_lightning.arguments import ANY, FILLED, Bounds, check, checked, shown
from fl_lightning.core.updates import UpdateMatrix
from fl_lightning.ops.rows import accumulation_device


@checked(
    losses=ANY, sizes=ANY, client_ids=Bounds(0), round=Bounds(0), client_lr=Bounds(0), num_clients=Bounds(1), extras=ANY
)
@dataclass(frozen=True)
class Cohort:
    """The reports of the clients that took part in a round, in sampling order.

    Parameters and rows are the strategy's own memory. Rules must not write to them, and must copy what they keep.
    ``losses``, ``sizes`` and ``extras`` may be tensors or sequences, and become float64. Losses and sizes, a number per
    client, lie on the CPU, where rules decide; extras lie on the rows' device, or on the CPU if the device has no
    float64. Where several processes divide the columns, ``n`` counts those of this one.

    Attributes:
        params: ``[n]`` global parameters at the start of the round.
        updates: one row per client, ``theta - theta_i`` (or learning rate times full gradient).
        losses: ``[m]`` loss of each client at ``params``, before local training; ``None`` if no rule asked for them.
        sizes: ``[m]`` training samples per client.
        client_ids: ``m`` distinct ids, the keys of everything that rules remember.
        round: index of the round, from 0.
        client_lr: the clients' learning rate where their optimizer defines one.
        num_clients: how many clients are registered, sampled or not; ``None`` outside a trainer.
        extras: further tensors, first dimension ``m`` (accuracies, disparities).
        companions: a second row per client (control variates, disparity gradients).
        losses_at: the cohort's losses ``[m]`` at given parameters ``[n]``; ``None`` if clients cannot be asked again.
        num_samples: training samples of all registered clients; ``None`` where they are not known.

    Raises:
        ValueError: a field's length, shape or content breaks the rules above; the message names the field.
    """

    params: Tensor
    updates: UpdateMatrix
    losses: Tensor | None
    sizes: Tensor
    client_ids: tuple[int, ...]
    round: int
    client_lr: float | None = None
    num_clients: int | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    companions: Mapping[str, UpdateMatrix] = field(default_factory=dict)
    losses_at: Callable[[Tensor], Tensor] | None = None
    num_samples: int | None = None

    def __post_init__(self) -> None:
        m, n, device = len(self.updates), self.updates.columns.numel, self.updates.device
        if m == 0:
            raise ValueError("updates must have at least one row, found none")
        if self.params.shape != (n,) or self.params.device != device:
            found = f"{tuple(self.params.shape)} on {self.params.device}"
            raise ValueError(f"params must have shape [{n}] on {device}, found {found}")
        if len(self.client_ids) != m or len(set(self.client_ids)) != m:
            raise ValueError(f"client_ids must be {m} distinct integers, found {self.client_ids}")
        if self.num_clients is not None and self.num_clients < m:
            raise ValueError(f"num_clients must be at least the {m} clients of the round, found {self.num_clients}")
        object.__setattr__(self, "sizes", _vector("sizes", self.sizes, m, positive=True))
        if self.num_samples is not None and self.num_samples < float(self.sizes.sum()):
            found = f"the {float(self.sizes.sum()):g} samples of the round, found {self.num_samples}"
            raise ValueError(f"num_samples must be at least {found}")
        if self.losses is not None:
            object.__setattr__(self, "losses", _vector("losses", self.losses, m))
        if type(self.extras) is not dict or len(self.extras):
            check("extras of Cohort", self.extras, Mapping[str, Any])
        extras = {name: _wide(f"extras[{name!r}]", value, self.params) for name, value in self.extras.items()}
        for name, value in extras.items():
            if value.dim() == 0 or value.shape[0] != m:
                raise ValueError(f"extras[{name!r}] must have first dimension {m}, found {tuple(value.shape)}")
        object.__setattr__(self, "extras", extras)
        for name, matrix in self.companions.items():
            if matrix.rows.shape != (m, n):
                raise ValueError(f"companions[{name!r}] must have shape [{m}, {n}], found {tuple(matrix.rows.shape)}")

    def __len__(self) -> int:
        return len(self.client_ids)

    @property
    def known_losses(self) -> Tensor:
        """The losses, for rules that need them.

        Raises:
            ValueError: the cohort was built without losses.
        """
        if self.losses is None:
            raise ValueError("losses must be given: this rule weighs clients by their loss at params")
        return self.losses


@checked(rates=FILLED)
def mean_rate(rates: Sequence[float]) -> float:
    """The mean of learning rates; exactly the rate itself where all are the same.

    Raises:
        ValueError: there are none.
    """
    return rates[0] if len(set(rates)) == 1 else fsum(rates) / len(rates)


def _given(name: str, value: Tensor | Sequence[float]) -> Tensor:
    known = type(value) is Tensor and not value.is_meta and value.layout is torch.strided
    given = value if known else check(name, value, Tensor | Sequence[Any])
    try:
        return given.detach() if isinstance(given, Tensor) else torch.as_tensor(given, dtype=torch.float64)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name} must be numbers, found {shown(value)}: {error}") from None


def _wide(name: str, value: Tensor | Sequence[float], like: Tensor) -> Tensor:
    given, device = _given(name, value), accumulation_device(like)
    if given.is_cpu:
        return given.to(torch.float64).to(device, non_blocking=True)  # nothing waits for the device
    return given.to(device).to(torch.float64)


def _vector(name: str, value: Tensor | Sequence[float], m: int, positive: bool = False) -> Tensor:
    given = _given(name, value)
    if given.shape != (m,):
        raise ValueError(f"{name} must have shape [{m}], found {tuple(given.shape)}")
    vector = given.cpu().to(torch.float64)
    least, most = (float(end) for end in vector.aminmax())  # NaN, if one is
    if not isfinite(least) or not isfinite(most):
        raise ValueError(f"{name} must be finite, found {shown(vector.tolist())}")
    if positive and least <= 0:
        raise ValueError(f"{name} must be positive, found {shown(vector.tolist())}")
    return vector
