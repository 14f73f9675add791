# SPDX-License-Identifier: Apache-2.0
"""What clients of a real federation have answered in a round, and which of it fits the server's model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.algorithms.records import ClientReport
from fl_lightning.simulation.federation_messages import ClientMessage
from fl_lightning.training.buffers import BufferBank
from fl_lightning.training.update_rows import UpdateRows
from fl_lightning.training.upload import Upload


def in_order(answers: Iterable[ClientMessage], cohort: Sequence[int], index: int) -> dict[int, ClientMessage]:
    """The answers by client, in the order of the cohort.

    Args:
        answers: in any order.
        cohort: the clients of the round.
        index: of the round.

    Raises:
        ValueError: two are of one client, or one is of none of the round.
    """
    given: dict[int, ClientMessage] = {}
    for answer in answers:
        if answer.client_id in given or answer.client_id not in cohort or answer.round != index:
            raise ValueError(
                f"answers must be one per client of round {index}, {tuple(cohort)}, found another one of client "
                f"{answer.client_id} and round {answer.round}"
            )
        given[answer.client_id] = answer
    return {client: given[client] for client in cohort if client in given}


def odd_ones(answers: Mapping[int, ClientMessage]) -> dict[int, str]:
    """Clients that send other extras or companions than most do, and how they differ."""
    kinds = {
        client: (
            tuple(sorted((name, tuple(value.shape)) for name, value in answer.extras.items())),
            tuple(sorted(answer.companions)),
        )
        for client, answer in answers.items()
    }
    if len(set(kinds.values())) <= 1:
        return {}
    usual = Counter(kinds.values()).most_common(1)[0][0]
    return {
        client: f"it sends {kind} besides its update, and others {usual}"
        for client, kind in kinds.items()
        if kind != usual
    }


class MisfitError(Exception):
    """What is wrong with an answer, as a sentence about the client."""


def upload_of(
    answer: ClientMessage, place: int, theta: Tensor, rows: UpdateRows, bank: BufferBank, needs_loss: bool
) -> Upload:
    """Takes an answer into the round's rows.

    Args:
        answer: the answer.
        place: its row.
        theta: ``[n]`` the global parameters.
        rows: the round's rows.
        bank: the server's buffers.
        needs_loss: the method weighs clients by their losses.

    Raises:
        MisfitError: it does not fit the model or the method.
    """
    if answer.update.shape != theta.shape or answer.update.dtype != theta.dtype:
        found = f"{answer.update.dtype} {list(answer.update.shape)}"
        raise MisfitError(f"its update must be {theta.dtype} {list(theta.shape)}, found {found}")
    if answer.size < 1:
        raise MisfitError("it has no training data")
    if needs_loss and answer.loss is None:
        raise MisfitError("it sent no loss")
    try:
        buffers = bank.report_with(answer.size, answer.buffers)
        rows.row(place).copy_(answer.update)
        rows.received(place)
        rows.take_companions(place, {name: value.to(theta.device) for name, value in answer.companions.items()})
    except ValueError as error:
        raise MisfitError(str(error)) from error
    mean = None if answer.train_loss is None else torch.tensor(answer.train_loss, dtype=torch.float64)
    report, rate = ClientReport(extras=answer.extras), answer.client_lr
    return Upload(place, answer.client_id, answer.size, mean, answer.loss, report, buffers, rate)
