# SPDX-License-Identifier: Apache-2.0
"""What clients of a real federation have answered in a round, and which of it fits the server's model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms.records import ClientReport, Needs
from fl_lightning.arguments import trusted
from fl_lightning.clients.buffers import BufferBank
from fl_lightning.clients.module_visits import Left
from fl_lightning.clients.update_rows import UpdateRows, Upload
from fl_lightning.federation.door import COMPANIONS, LARGEST, OUTLIER, MisfitError, loss, outliers, read, said
from fl_lightning.federation.messages import ClientMessage
from fl_lightning.federation.module_state import HomeModule

_FAR = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes in which numbers may be large."""


class LostClientsError(Exception):
    """Clients have not said what a method asked for in the middle of a round."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__("; ".join(f"client {client}: {why}" for client, why in reasons.items()))
        self.reasons = dict(reasons)


@dataclass(frozen=True)
class Fitting:
    """What answers of a round must fit."""

    round: int
    theta: Tensor  # [n] the global parameters
    bank: BufferBank  # the server's
    needs: Needs
    module: HomeModule  # the server's, which reads what visits have left
    _left: dict[int, Left] = field(default_factory=dict)

    def sorted_out(self, answers: Mapping[int, object]) -> tuple[dict[int, ClientMessage], dict[int, str]]:
        """The answers that fit, by client, and why others do not."""
        fitting: dict[int, ClientMessage] = {}
        misfits: dict[int, str] = {}
        for client, found in answers.items():
            try:
                fitting[client] = self._fitting(client, read(ClientMessage, found))
            except MisfitError as flaw:  # noqa: PERF203 - once per client and round
                misfits[client] = str(flaw)
        odd = _odd_ones(fitting)
        if self.needs.client_lr or self.needs.full_gradients:
            odd |= _fast_ones(fitting)
        return {client: answer for client, answer in fitting.items() if client not in odd}, misfits | odd

    def _fitting(self, client: int, answer: ClientMessage) -> ClientMessage:
        theta, needs = self.theta, self.needs
        if (answer.client_id, answer.round) != (client, self.round):
            raise MisfitError(f"it answers for client {answer.client_id} and round {answer.round}")
        if answer.size < 1:
            raise MisfitError("it has no training data")
        for name in ("loss",) * needs.losses + ("client_lr",) * (needs.client_lr or needs.full_gradients):
            if getattr(answer, name) is None:
                raise MisfitError(f"it sent no {name}")
        if len(answer.companions) > COMPANIONS:
            raise MisfitError(f"it must send at most {COMPANIONS} companions, found {len(answer.companions)}")
        rows = {"update": answer.update, **{f"companion {name!r}": row for name, row in answer.companions.items()}}
        for name, row in rows.items():
            if row.shape != theta.shape or row.dtype != theta.dtype:
                found = f"{row.dtype} {list(row.shape)}"
                raise MisfitError(f"its {said(name)} must be {theta.dtype} {list(theta.shape)}, found {found}")
        known = self.bank.global_values()
        odd = [name for name, value in answer.buffers.items() if name in known and value.dtype != known[name].dtype]
        if odd:
            raise MisfitError(
                f"its buffer {odd[0]} must be {known[odd[0]].dtype}, found {answer.buffers[odd[0]].dtype}"
            )
        if any(value.is_complex() for value in answer.extras.values()):
            raise MisfitError("its extras must be real, found complex ones")
        for name, values in {**rows, **{f"extra {name!r}": value for name, value in answer.extras.items()}}.items():
            if _is_large(values):  # NaN is found where losses and buffers are, in one pass
                raise MisfitError(f"its {said(name)} must lie between -{LARGEST:g} and {LARGEST:g}, found others")
        try:
            self.bank.report_with(answer.size, answer.buffers)
        except (ValueError, KeyError) as error:
            raise MisfitError(said(error)) from error
        self._left[client] = self.module.read(answer.left)
        return answer

    def upload(self, answer: ClientMessage, place: int, rows: UpdateRows) -> Upload:
        """Takes an answer that fits into row ``place`` of the round."""
        rows.row(place).copy_(answer.update)
        rows.received(place)
        rows.take_companions(place, {name: row.to(self.theta.device) for name, row in answer.companions.items()})
        mean = None if answer.train_loss is None else torch.tensor(answer.train_loss, dtype=torch.float64)
        buffers = self.bank.report_with(answer.size, answer.buffers, answer.votes)
        report, rate = trusted(ClientReport)(extras=answer.extras), answer.client_lr
        left = self._left[answer.client_id]
        return Upload(place, answer.client_id, answer.size, mean, answer.loss, report, buffers, rate, left=left)


def losses_of(
    ask: Callable[[Tensor, Sequence[int]], Mapping[int, Any]], params: Tensor, clients: Sequence[int]
) -> Tensor:
    """``[m]`` losses of clients at parameters ``[n]``.

    ``ask`` gives them by client; a sentence, or nothing, where there is none: then this raises LostClientsError.
    """
    said_so, found, lost = ask(params, clients), list[float](), dict[int, str]()
    for client in clients:
        given = said_so.get(client, "no answer")
        try:
            found.append(loss(given))
        except MisfitError as flaw:
            why = said(given) if isinstance(given, str) else str(flaw)
            lost[client] = f"it was asked for its loss once more: {why}"
    if lost:
        raise LostClientsError(lost)
    return torch.tensor(found, dtype=torch.float64)


def _is_large(values: Tensor) -> bool:
    if values.numel() == 0 or values.dtype not in _FAR:
        return False
    low, high = values.aminmax()
    return max(-float(low), float(high)) > LARGEST


def _fast_ones(answers: Mapping[int, ClientMessage]) -> dict[int, str]:
    """Clients that do not share the others' learning rate, whose mean a method takes for the rate of all."""
    rates = {client: answer.client_lr for client, answer in answers.items() if answer.client_lr is not None}
    fast, most = outliers(rates)
    return {
        client: f"its learning rate must be at most {OUTLIER} times the median, {most:g}, found {rate:g}"
        for client, rate in fast.items()
    }


def _odd_ones(answers: Mapping[int, ClientMessage]) -> dict[int, str]:
    """Clients that send other things besides their updates than most do, and how they differ."""
    kinds = {
        client: (
            tuple(sorted((name, str(value.dtype), tuple(value.shape)) for name, value in answer.extras.items())),
            tuple(sorted(answer.companions)),
            answer.client_lr is None,
        )
        for client, answer in answers.items()
    }
    if len(set(kinds.values())) <= 1:
        return {}
    usual = Counter(kinds.values()).most_common(1)[0][0]
    return {
        client: said(f"it sends other extras, companions or learning rates than most: {kind[:2]}, and not {usual[:2]}")
        for client, kind in kinds.items()
        if kind != usual
    }
