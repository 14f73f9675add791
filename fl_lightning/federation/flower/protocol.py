# SPDX-License-Identifier: Apache-2.0
"""What goes over Flower's messages besides the messages of :mod:`fl_lightning.federation.messages`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fl_lightning.arguments import checked
from fl_lightning.core.records import EvaluationRecord
from fl_lightning.federation.door import CLIENTS, FEDERATION, evaluation
from fl_lightning.federation.messages import ClientMessage

HELLO, LOSS = "hello", "loss"
"""Actions of a query: an introduction, and a loss at other parameters."""
FAILED = 100
"""Code of the error that a client app answers with; the reason says what was raised."""


@checked(num_clients=CLIENTS, federation=FEDERATION)
@dataclass(frozen=True)
class Origin:
    """What every message of a server says beside its own."""

    num_clients: int
    federation: str  # its name


@checked()
@dataclass(frozen=True)
class Order:
    """What a client is to do with a round's message."""

    trains: bool
    stages: tuple[Literal["val", "test"], ...]  # to evaluate on before, each once
    evaluated: Tensor | None  # [n]; None: those of the message

    def __post_init__(self) -> None:
        if len(set(self.stages)) < len(self.stages):
            raise ValueError(f"stages must be different, found {len(self.stages)}")


@checked()
@dataclass(frozen=True)
class Answer:
    """A client's answer to a round's message."""

    trained: Mapping[str, Any] | None  # fields of its :class:`ClientMessage`; None if it was only to evaluate
    evaluations: Sequence[Mapping[str, Any]]  # fields of records

    @classmethod
    def of(cls, trained: ClientMessage | None, evaluations: Sequence[EvaluationRecord]) -> Answer:
        """The answer with these parts."""
        return cls(None if trained is None else vars(trained), [vars(record) for record in evaluations])

    def evaluation(self, client_id: int, index: int, stage: str) -> EvaluationRecord | None:
        """What the client has found in a stage; ``None`` without data of it."""
        for fields in self.evaluations:
            if fields.get("stage") == stage:
                return evaluation(fields, client_id, index, stage)
        return None


@dataclass(frozen=True)
class Nothing:
    """A message without fields of its own."""


@dataclass(frozen=True)
class Loss:
    """A client's loss at the parameters that it was sent; the server's door looks at it."""

    loss: Any
