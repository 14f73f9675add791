# SPDX-License-Identifier: Apache-2.0
"""What goes between a fit and the two halves of a method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.arguments import Bounds, checked, trusted
from fl_lightning.core.cohort import mean_rate
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage.declared import Extent
from fl_lightning.core.updates import Columns

Reading = Literal["library", "paper", "code"]
"""Whose form a method takes in the steps where its paper and its authors' code differ.

``"library"`` decides step by step, as the method's page in docs/methods lists; the others take one source throughout.
"""

State = dict[str, Any]
"""Tensors, numbers, strings, and lists or dicts of them: what ``torch.load(weights_only=True)`` accepts."""

Reads = Literal["sums", "gram", "rows"]
"""What the server must get to see of the clients' rows; each includes the ones before.

===========  ===========================================================================================================
``"sums"``   sums of the rows, with weights that follow from sizes, losses, extras and the norms of single rows, all of
             which a client can send as numbers: the rows themselves may stay hidden (secure aggregation)
``"gram"``   inner products of the rows of a round, too
``"rows"``   single rows, coordinate by coordinate, in this round or kept for later ones
===========  ===========================================================================================================
"""
READS: Mapping[Reads, str] = {
    "sums": "sums of the updates alone, so that secure aggregation could hide single updates",
    "gram": "inner products of the clients' updates, which secure aggregation does not give",
    "rows": "every client's update in clear",
}
"""In words."""


@checked()
@dataclass(frozen=True)
class Needs:
    """What a rule asks of the strategy beyond updates and sizes.

    Attributes:
        losses: each client's loss at the global parameters, before local training.
        full_gradients: rows are learning rate times full gradient (one full-batch step) instead of local training.
        client_lr: the clients' learning rate; optimizers without a single one are refused.
        requery: ``Cohort.losses_at``.
        accuracies: each client's accuracy at the global parameters, before local training, as ``extras["accuracy"]``.
            The module defines ``federated_accuracy(batch, batch_idx)``, the share of a batch that it predicts right.
        features: the module's ``federated_features(batch)``, see :mod:`fl_lightning.algorithms.features`.
        groups: the module's ``federated_groups(batch)``, see :mod:`fl_lightning.algorithms.groups`.
        exact_step: the new parameters are ``params - step``; server optimizers, which change that, are refused.
        dense_gradients: an optimizer of dense gradients; ``SparseAdam``, which takes sparse ones alone, is refused.
    """

    losses: bool = False
    full_gradients: bool = False
    client_lr: bool = False
    requery: bool = False
    accuracies: bool = False
    features: bool = False
    groups: bool = False
    exact_step: bool = False
    dense_gradients: bool = False

    def __or__(self, other: Needs) -> Needs:
        names = [entry.name for entry in fields(Needs)]
        return trusted(Needs)(*(getattr(self, name) or getattr(other, name) for name in names))


@checked(num_clients=Bounds(1), cohort_size=Bounds(1), rounds=Bounds(1), buffers=Bounds(0))
@dataclass(frozen=True)
class Federation:
    """What stays fixed during a fit; handed to rules before the first round.

    Attributes:
        num_clients: registered clients.
        layout: the flat order of the parameters.
        device: where parameters and rows are.
        dtype: of parameters and rows.
        cohort_size: clients sampled per round; ``None`` if unknown.
        rounds: rounds of the fit, those before a resumption included; ``None`` if unknown.
        columns: those of the rule's process, where several share them; ``None``: all.
        buffers: bytes of the module's buffers.
    """

    num_clients: int
    layout: ParamLayout
    device: torch.device
    dtype: torch.dtype
    cohort_size: int | None = None
    rounds: int | None = None
    columns: Columns | None = None
    buffers: int = 0

    @property
    def numel(self) -> int:
        """Columns of the rule's process: the length of its parameters, rows and steps."""
        return self.layout.numel if self.columns is None else self.columns.numel

    def extent(self, cohort_size: int) -> Extent:
        """How large what a method keeps can get, with so many clients per round."""
        model = self.layout.numel * self.dtype.itemsize + self.buffers
        return Extent(self.num_clients, cohort_size, self.numel, self.layout.num_layers, model, self.dtype)


@checked(scalars=Bounds(finite=False))
@dataclass(frozen=True)
class StepReport:
    """How a server rule arrived at its step, for logs and monitors.

    Attributes:
        weights: ``[m]`` effective weight of each client's row in the step (its share, averaged over layers by size).
        flagged: the rule met a degenerate case and fell back (the documentation of the rule says how).
        scalars: further numbers worth logging.
    """

    weights: Tensor | None = None
    flagged: bool = False
    scalars: Mapping[str, float] = field(default_factory=dict)


@checked(
    client_id=Bounds(0),
    round=Bounds(0),
    num_samples=Bounds(0),
    client_lr=Bounds(0),
    momentum=Bounds(0),
    steps=Bounds(0),
    window=Bounds(1),
)
@dataclass
class LocalWork:
    """One client's local training while it runs; client rules read and extend it.

    Attributes:
        client_id: the client.
        round: index of the round.
        module: the module in training.
        layout: the flat order of parameters.
        parameters: the module's parameters in flat order: the client's own, from the global ones on.
        params: ``[n]`` global parameters, not to be written.
        num_samples: training samples of the client.
        client_lr: learning rate if the optimizer defines one: that of the present step, and in ``end_client`` the mean
            over the steps.
        momentum: momentum of the client's SGD, 0 without.
        steps: optimizer steps taken so far.
        rates: the learning rate of each of them, if a schedule has changed it from step to step; empty if not.
        forward_context: context that forward passes of the module belong into (mixed precision).
        own_loss: the module's own loss of a batch, from the batch and its place in its pass, at whatever parameters the
            module has at the moment; nothing is logged and metrics stay as they are. ``None`` outside a trainer.
        batches: starts a pass over the client's training data, on the module's device and in the dataset's order:
            batches with their numbers of samples. ``None`` outside a trainer.
        window: batches per optimizer step (``accumulate_grad_batches``). Each batch's loss is divided by it, also where
            a pass ends with fewer of them.
    """

    client_id: int
    round: int
    module: nn.Module
    layout: ParamLayout
    parameters: list[nn.Parameter]
    params: Tensor
    num_samples: int
    client_lr: float | None = None
    momentum: float = 0.0
    steps: int = 0
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    own_loss: Callable[[Any, int], Tensor] | None = None
    batches: Callable[[], Iterator[tuple[Any, int]]] | None = None
    rates: list[float] = field(default_factory=list)
    window: int = 1

    def take_rate(self, rate: float | None) -> None:
        """Notes the learning rate of a step that is about to be taken."""
        self.client_lr = rate
        if rate is not None:
            self.rates.append(rate)

    def end_steps(self) -> None:
        """Local training is over: :attr:`client_lr` becomes the mean, exactly the rate itself if it has not changed."""
        if self.client_lr is not None and self.rates:
            self.client_lr = mean_rate(self.rates)
        if len(set(self.rates)) <= 1:
            self.rates.clear()

    @property
    def row(self) -> Tensor:
        """``[n]`` the client's own parameters as they are now, a copy."""
        return self.layout.flatten(self.parameters)


@checked()
@dataclass(frozen=True)
class ClientReport:
    """What a client's visit leaves behind besides its update.

    Attributes:
        extras: tensors for the server, finite but for those of :attr:`ClientRule.undefined_extras`.
        companions: flat vectors ``[n]`` for the server, which become companion rows.
        local_state: what stays at the client, complete, by the names of what the rule declares with ``at_clients``. It
            takes the place of what the client had if the report enters the step. The server of a real federation never
            sees it.
    """

    extras: Mapping[str, Tensor] = field(default_factory=dict)
    companions: Mapping[str, Tensor] = field(default_factory=dict)
    local_state: State = field(default_factory=dict)
