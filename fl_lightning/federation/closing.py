# SPDX-License-Identifier: Apache-2.0
"""Closes a round of a real federation with those of the clients' answers that fit and that the method can work with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms.records import ClientReport, Needs
from fl_lightning.arguments import trusted
from fl_lightning.clients.update_rows import UpdateRows, Upload
from fl_lightning.core.errors import ClientError
from fl_lightning.core.records import RoundRecord
from fl_lightning.federation.message_checks import (
    COMPANIONS,
    LARGEST,
    OUTLIER,
    MessageError,
    loss,
    outliers,
    printable,
    read,
)
from fl_lightning.federation.messages import ClientMessage
from fl_lightning.federation.served_model import ServedModel
from fl_lightning.fit.server import Server
from fl_lightning.fit.uploads import Round

_FAR = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes in which numbers may be large."""


class LostClientsError(Exception):
    """Clients have not said what a method asked for in the middle of a round."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__("; ".join(f"client {client}: {why}" for client, why in reasons.items()))
        self.reasons = dict(reasons)


@dataclass(frozen=True)
class Closing:
    """Takes answers that fit, tries the method on them, and leaves out whoever it fails for."""

    server: Server
    model: ServedModel  # that answers must fit
    needs: Needs
    rows: UpdateRows
    cohort: Sequence[int]  # clients of the round, by row
    num_samples: Callable[[Mapping[int, int]], int | None]  # of all clients, by what those of the round say now
    _uploads: dict[int, Upload] = field(default_factory=dict)  # of answers that fit, by client

    def closed(
        self, current: Round, answers: Mapping[int, object], why: Mapping[int, str], silent: Iterable[int]
    ) -> tuple[RoundRecord, dict[int, ClientMessage]]:
        """The record of the round, computed as if those who are left out had not been there, and the answers that fit.

        ``current`` says whom the round has left out so far, ``answers`` what came by client, ``why`` why nothing usable
        came of others, and ``silent`` from whom nothing came at all. Raises ClientError if too many rounds in a row
        have failed.
        """
        accepted, misfits = self._sorted_out(current.index, {k: answers[k] for k in self.cohort if k in answers})
        why = {**why, **misfits}
        current.trained = len(answers.keys() | why.keys() - set(silent))
        for client in self.cohort:
            if client not in current.dropped and client not in accepted:
                self.server.failures.drop(current, client, why.get(client, "no answer"))
        return self._tried(current, accepted), accepted

    # ---- which answers fit

    def _sorted_out(
        self, index: int, answers: Mapping[int, object]
    ) -> tuple[dict[int, ClientMessage], dict[int, str]]:  # fmt: skip
        """The answers that fit, by client, and why others do not."""
        fitting: dict[int, ClientMessage] = {}
        misfits: dict[int, str] = {}
        for client, found in answers.items():
            try:
                fitting[client] = self._fitting(client, index, read(ClientMessage, found))
            except MessageError as flaw:  # noqa: PERF203 - once per client and round
                misfits[client] = str(flaw)
        odd = _odd_ones(fitting)
        if self.needs.client_lr or self.needs.full_gradients:
            odd |= _fast_ones(fitting)
        return {client: answer for client, answer in fitting.items() if client not in odd}, misfits | odd

    def _fitting(self, client: int, index: int, answer: ClientMessage) -> ClientMessage:
        """The answer, whose upload is then among the others; raises MessageError if it does not fit."""
        theta, needs, bank = self.model.params, self.needs, self.model.buffers
        if (answer.client_id, answer.round) != (client, index):
            raise MessageError(f"it answers for client {answer.client_id} and round {answer.round}")
        if answer.size < 1:
            raise MessageError("it has no training data")
        for name in ("loss",) * needs.losses + ("client_lr",) * (needs.client_lr or needs.full_gradients):
            if getattr(answer, name) is None:
                raise MessageError(f"it sent no {name}")
        if len(answer.companions) > COMPANIONS:
            raise MessageError(f"it must send at most {COMPANIONS} companions, found {len(answer.companions)}")
        rows = {"update": answer.update, **{f"companion {name!r}": row for name, row in answer.companions.items()}}
        for name, row in rows.items():
            if row.shape != theta.shape or row.dtype != theta.dtype:
                found = f"{row.dtype} {list(row.shape)}"
                raise MessageError(f"its {printable(name)} must be {theta.dtype} {list(theta.shape)}, found {found}")
        known = bank.global_values()
        odd = [name for name, value in answer.buffers.items() if name in known and value.dtype != known[name].dtype]
        if odd:
            raise MessageError(
                f"its buffer {odd[0]} must be {known[odd[0]].dtype}, found {answer.buffers[odd[0]].dtype}"
            )
        if any(value.is_complex() for value in answer.extras.values()):
            raise MessageError("its extras must be real, found complex ones")
        for name, values in {**rows, **{f"extra {name!r}": value for name, value in answer.extras.items()}}.items():
            if _is_large(values):  # NaN is found where losses and buffers are, in one pass
                raise MessageError(f"its {printable(name)} must lie between -{LARGEST:g} and {LARGEST:g}, found others")
        try:
            buffers = bank.report_with(answer.size, answer.buffers)
        except (ValueError, KeyError) as error:
            raise MessageError(printable(error)) from error
        module_change = self.model.server_module.read(answer.module)
        report = trusted(ClientReport)(extras=answer.extras)
        mean = None if answer.train_loss is None else torch.tensor(answer.train_loss, dtype=torch.float64)
        self._uploads[client] = Upload(
            self.cohort.index(client), client, answer.size, mean, answer.loss, report, buffers, answer.client_lr,
            module_change=module_change, loss_batch_factor=answer.loss_batch_factor,
        )  # fmt: skip
        return answer

    # ---- what the method makes of them

    def _tried(self, current: Round, accepted: Mapping[int, ClientMessage]) -> RoundRecord:
        refused: tuple[type[Exception], ...] = ()
        while True:
            self._fill(current, accepted)
            before = dict(current.dropped)
            try:
                with self.server.closed(current, refused) as record:
                    return record
            except ClientError:
                raise
            except LostClientsError as lost:
                current.dropped, blamed = before, lost.reasons
            except Exception:  # of a method, whose every reason may be what a client sent
                if refused:
                    raise
                current.dropped, blamed = before, self._blamed(current, accepted)
                if len(blamed) == len(current.uploads):  # it is not theirs
                    blamed = {}
            for client, reason in blamed.items():
                self.server.failures.drop(current, client, printable(reason))
            if not blamed:  # no answer fails alone: the same error again leaves the round out
                refused = (Exception,)

    def _blamed(self, current: Round, accepted: Mapping[int, ClientMessage]) -> dict[int, str]:
        """The clients with whose answers alone the method fails, and how."""
        found: dict[int, str] = {}
        for client in [upload.client_id for upload in current.uploads]:
            alone = Round(current.index, asks=current.asks)
            self._fill(alone, {client: accepted[client]})
            words = self.server.trial(alone)
            if words is not None:
                found[client] = words
        return found

    def _fill(self, current: Round, accepted: Mapping[int, ClientMessage]) -> None:
        """Writes the answers of these clients into the rows of the round, but for those that are left out."""
        self.rows.begin_round()  # an earlier try has moved rows to the front, and guards have changed them
        current.uploads.clear()
        for client in self.cohort:
            if client in accepted and client not in current.dropped:
                upload, answer = self._uploads[client], accepted[client]
                self.rows.row(upload.index).copy_(answer.update)
                self.rows.received(upload.index)
                self.rows.take_companions(upload.index, answer.companions)
                current.uploads.append(upload)
        sizes = {upload.client_id: upload.size for upload in current.uploads}
        self.server.num_samples = self.num_samples(sizes)


def losses_of(
    ask: Callable[[Tensor, Sequence[int]], Mapping[int, Any]], params: Tensor, clients: Sequence[int]
) -> Tensor:
    """``[m]`` losses of clients at parameters ``[n]``.

    ``ask`` gives them by client; a sentence, or nothing, where there is none: then this raises LostClientsError.
    """
    answers, found, lost = ask(params, clients), list[float](), dict[int, str]()
    for client in clients:
        answer = answers.get(client, "no answer")
        try:
            found.append(loss(answer))
        except MessageError as flaw:
            why = printable(answer) if isinstance(answer, str) else str(flaw)
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
        client: printable(
            f"it sends other extras, companions or learning rates than most: {kind[:2]}, and not {usual[:2]}"
        )
        for client, kind in kinds.items()
        if kind != usual
    }
