# SPDX-License-Identifier: Apache-2.0
"""What goes over Flower's messages besides the messages of :mod:`fl_lightning.simulation.federation_messages`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning.core.records import EvaluationRecord
from fl_lightning.simulation.federation_messages import ClientMessage

HELLO, LOSS = "hello", "loss"
"""Actions of a query: an introduction, and a loss at other parameters."""
FAILED = 100
"""Code of the error that a client app answers with; the reason says what was raised."""


@dataclass(frozen=True)
class Answer:
    """A client's answer to a round's message.

    Attributes:
        trained: fields of its :class:`ClientMessage`; ``None`` if it was only to evaluate.
        evaluations: fields of its :class:`EvaluationRecord` objects.
    """

    trained: Mapping[str, Any] | None
    evaluations: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, trained: ClientMessage | None, evaluations: Sequence[EvaluationRecord]) -> Answer:
        """The answer with these parts."""
        return cls(None if trained is None else vars(trained), [vars(record) for record in evaluations])

    def message(self, client_id: int, index: int) -> ClientMessage:
        """What the client has trained.

        Args:
            client_id: the client that was asked.
            index: of the round.

        Raises:
            ValueError: it is no answer of this client to this round.
        """
        message: ClientMessage = _made(ClientMessage, self.trained or {})
        if (message.client_id, message.round) != (client_id, index):
            raise ValueError(f"it answers for client {message.client_id} and round {message.round}")
        return message

    def evaluation(self, client_id: int, index: int, stage: str) -> EvaluationRecord | None:
        """What the client has found in a stage; ``None`` without data of it.

        Raises:
            ValueError: as :meth:`message`.
        """
        for fields in self.evaluations:
            record: EvaluationRecord = _made(EvaluationRecord, fields)
            shapes = {tuple(value.shape) for value in (record.sizes, *record.values.values())}
            if record.client_ids != (client_id,) or record.round != index or shapes != {(1,)}:
                raise ValueError(f"it has evaluated clients {record.client_ids} after round {record.round}")
            if record.stage == stage:
                return record
        return None


@dataclass(frozen=True)
class Nothing:
    """A message without fields of its own."""


@dataclass(frozen=True)
class Loss:
    """A client's loss at the parameters that it was sent."""

    loss: float


def _made(kind: Any, fields: Mapping[str, Any]) -> Any:
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"its answer is not whole: {error}") from error
