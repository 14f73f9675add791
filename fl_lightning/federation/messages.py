# SPDX-License-Identifier: Apache-2.0
"""What server and clients of a real federation send one another, once per client and round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.records import State
from fl_lightning.arguments import Bounds, checked, trusted
from fl_lightning.clients.client_batches import MAX_FACTOR
from fl_lightning.clients.update_rows import Upload
from fl_lightning.core.records import NAME
from fl_lightning.core.storage import rule_state
from fl_lightning.core.tensors import all_finite
from fl_lightning.lightning.round_clock import MeanVisit

CLIENT, ROUND = Bounds(0, 10**9), Bounds(0, 10**7)
SAMPLES, STEPS = Bounds(0, 10**12), Bounds(0, 10**9)
LOSS = Bounds(-1e15, 1e15, finite=False)
"""NaN and infinity pass here: a client whose training diverged is named as such later."""
LOSS_BATCH_FACTOR = Bounds(1, MAX_FACTOR)


@checked(
    round=ROUND, counted=ROUND, steps_per_round=Bounds(1, 10**7), rounds=Bounds(1, 10**7),
    loss_batch_factor=LOSS_BATCH_FACTOR,
)  # fmt: skip
@dataclass(frozen=True)
class ServerMessage:
    """What a client needs to train in a round.

    The fields hold tensors, numbers, strings, and lists or dicts of them: ``torch.save(vars(message), file)`` writes a
    message, ``ServerMessage(**torch.load(file))`` reads it.

    Attributes:
        round: index of the round, from 0.
        params: ``[n]`` the global parameters, in the order of :class:`fl_lightning.ParamLayout`.
        broadcast: what the method sends to every client of the round (``sent="all"``).
        client_state: what the method sends to this client alone (``sent="owner"``).
        counted: the last round in which this client's message entered the step; ``None``: there is none. What the
            client kept in that round is its own, and what it kept since is forgotten.
        buffers: the module's global buffers, by name; empty: the client's module has them already.
        steps_per_round: what a round counts as (:attr:`FitDescription.steps_per_round`): mean optimizer steps of a
            client's visit, rounded up. A client with its own data alone needs it if schedulers step within visits.
        module: what rounds have changed in the module's attributes; empty: nothing, or nobody says.
        loss_batch_factor: a forward pass that measures the client's loss has so many times the samples of a training
            batch; ``None``: as many, and the client says how many times as many give the same loss.
        rounds: of the whole federation, which is the client's ``trainer.max_epochs``. Schedules that ask for it, or for
            ``estimated_stepping_batches``, need it.

    Raises:
        ValueError: ``round`` is negative or not below ``rounds``, ``counted`` is no earlier round, or
            ``steps_per_round`` is not positive.
    """

    round: int
    params: Tensor
    broadcast: State = field(default_factory=dict)
    client_state: State = field(default_factory=dict)
    counted: int | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    steps_per_round: int | None = None
    rounds: int | None = None
    module: Mapping[str, Any] = field(default_factory=dict)
    loss_batch_factor: int | None = None

    def __post_init__(self) -> None:
        if self.rounds is not None and self.rounds <= self.round:
            raise ValueError(f"rounds must be None or more than round {self.round}, found {self.rounds}")
        if self.counted is not None and self.counted >= self.round:
            raise ValueError(f"counted must be None or a round before round {self.round}, found {self.counted}")

    def check_params(self, theta: Tensor) -> None:
        """Compares the parameters with those of a client's module ``[n]``.

        Raises:
            ValueError: they have another shape or dtype, or are not finite.
        """
        if self.params.shape != theta.shape or self.params.dtype != theta.dtype:
            found = f"{self.params.dtype} {list(self.params.shape)}"
            raise ValueError(f"params must be {theta.dtype} {list(theta.shape)}, found {found}")
        if not bool(all_finite(self.params)):
            raise ValueError("params must be finite, found NaN or infinity")

    @checked(client_id=CLIENT)
    def to_client(self, client_id: int, rule: ClientRule) -> ServerMessage:
        """The message with what the method says to one client; tensors are not copied.

        Args:
            client_id: the client.
            rule: the client half of the method, which the server commits with every round.
        """
        return replace(
            self, broadcast=rule_state.broadcast(rule), client_state=rule_state.client_state(rule, client_id)
        )


@checked(
    client_id=CLIENT, round=ROUND, size=SAMPLES, loss=LOSS, train_loss=LOSS, client_lr=Bounds(0, 1e6), steps=STEPS,
    loss_batch_factor=LOSS_BATCH_FACTOR,
)  # fmt: skip
@dataclass(frozen=True)
class ClientMessage:
    """What a client sends after its local training; it is written and read as a :class:`ServerMessage` is.

    Attributes:
        client_id: the client.
        round: index of the round.
        update: ``[n]`` ``theta - theta_i`` (or learning rate times full gradient), the client's row of the cohort.
        size: training samples.
        loss: the client's loss at the parameters that it received; ``None`` if the method does not ask for it.
        train_loss: mean local training loss; ``None`` if the module reported none.
        client_lr: mean learning rate of the client's steps, where its optimizer defines one.
        extras: what the method sends besides, one tensor per name.
        companions: ``[n]`` vectors that become companion rows of the cohort.
        buffers: the module's buffers after training, by name; empty if the server does not combine them.
        steps: optimizer steps of the visit.
        module: what its visit has changed in attributes and metrics of the module.
        loss_batch_factor: batches so many times as large as in training give the same loss; 1: no larger ones do;
            ``None``: it was not asked, or cannot tell.
    """

    client_id: int
    round: int
    update: Tensor
    size: int
    loss: float | None
    train_loss: float | None
    client_lr: float | None
    extras: Mapping[str, Tensor]
    companions: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    steps: int = 0
    module: Mapping[str, Any] = field(default_factory=dict)
    loss_batch_factor: int | None = None


def answer_of(
    upload: Upload, index: int, update: Tensor, buffers: Mapping[str, Tensor], module: Mapping[str, Any]
) -> ClientMessage:
    """The message with what a visit gave; ``update`` is the client's row, ``module`` what it changed in the module."""
    return trusted(ClientMessage)(
        upload.client_id, index, update.cpu(), upload.size, upload.loss,
        None if upload.train_loss is None else float(upload.train_loss), upload.client_lr,
        _on_cpu(upload.report.extras), _on_cpu(upload.report.companions), _on_cpu(buffers), upload.step_counts.steps,
        module, upload.loss_batch_factor,
    )  # fmt: skip


def _on_cpu(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in values.items()}


@checked(client_id=CLIENT, name=NAME, size=SAMPLES, steps=STEPS, frozen=NAME)
@dataclass(frozen=True)
class ClientIntroduction:
    """What a client says of itself before its first round; it is written and read as a :class:`ServerMessage` is.

    Attributes:
        client_id: the client.
        name: what people call it.
        size: training samples.
        steps: optimizer steps that its visit takes.
        description: :attr:`FederatedClient.fit_description` as :meth:`FitDescription.state_dict` writes it.
        frozen: a digest of the parameters without gradients, which no message holds.
    """

    client_id: int
    name: str
    size: int
    steps: int
    description: Mapping[str, Any]
    frozen: str


def federation_mean_visit(
    message: ServerMessage, own: MeanVisit, has_all: bool, local_epochs: int, full_gradients: bool
) -> MeanVisit | None:
    """The plan of visits as far as a client of a real federation can know it; ``None`` if it does not.

    ``own`` is the plan by the data that the client has; with ``has_all`` these are the data of all clients.
    """
    given = message.steps_per_round
    if has_all and given not in (None, own.steps):
        raise ValueError(f"steps_per_round must be that of the federation, {own.steps}, found {given}")
    if has_all or given is None:
        return own if has_all else None
    if full_gradients:
        return replace(own, steps=given)
    batches = given * own.window
    return MeanVisit(given, batches, -(-batches // local_epochs), own.window)
