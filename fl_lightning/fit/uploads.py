# SPDX-License-Identifier: Apache-2.0
"""What clients send in a round, which of it may enter the aggregation, and the cohort that server rules see of it.

Clients and rounds that come to nothing are left out and counted, or the fit ends (:class:`Failures`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.arguments import trusted
from fl_lightning.clients.buffers import BufferBank
from fl_lightning.clients.module_isolation import ModuleIsolation
from fl_lightning.clients.schedules import HandSet
from fl_lightning.clients.update_rows import UpdateRows, Upload
from fl_lightning.core.errors import ClientError, ModuleError
from fl_lightning.core.records import RoundRecord, client_label
from fl_lightning.fit.options import FitOptions
from fl_lightning.lightning.names import rank_zero_info, rank_zero_warn

_NAMED = 3  # clients in a message about a round


@dataclass
class Round:
    """A round in progress."""

    index: int  # from 0
    uploads: list[Upload] = field(default_factory=list)  # what has arrived
    dropped: dict[int, str] = field(default_factory=dict)  # who is left out, and why
    trained: int = 0  # clients whose training began, whatever came of it
    asks: Callable[[Tensor, Sequence[int]], Tensor] | None = None
    drop_outs: Collection[int] = ()  # clients that were drawn and do not answer
    began: float = field(default_factory=lambda: time.perf_counter())

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.perf_counter() - self.began


@dataclass(frozen=True)
class UsableUploads:
    """What may enter the aggregation: ``m`` uploads by ascending row."""

    uploads: list[Upload]
    norms: Tensor  # [m] of the updates, float64 on the CPU
    train_losses: list[float | None]

    @property
    def train_loss(self) -> float:
        """Mean of the losses that there are, by samples; NaN without any."""
        pairs = zip(self.train_losses, self.uploads, strict=True)
        known = [(loss, upload.size) for loss, upload in pairs if loss is not None]
        return sum(loss * size for loss, size in known) / sum(size for _, size in known) if known else nan

    def at(self, places: Sequence[int]) -> UsableUploads:
        """Those at these places."""
        return UsableUploads(
            [self.uploads[k] for k in places], self.norms[places], [self.train_losses[k] for k in places]
        )


def merge_module_changes(isolation: ModuleIsolation, uploads: Sequence[Upload], counted: Collection[int]) -> HandSet:
    """Joins what visits of a round have left in the module; the options that the visit has set which decides."""
    entered = [upload for upload in uploads if upload.client_id in counted]
    largest = max(entered, key=lambda upload: upload.size, default=None)
    isolation.merge([upload.module_change for upload in uploads], None if largest is None else largest.module_change)
    return () if largest is None else largest.hand_set


def agreed_loss_batch_factor(uploads: Sequence[Upload]) -> int | None:
    """How many times as large as in training batches are that measure losses: what gives the same to all clients."""
    found = {u.client_id: u.loss_batch_factor for u in uploads if u.loss_batch_factor is not None}
    if not found:
        return None
    client, factor = min(found.items(), key=lambda item: item[1])
    if factor == 1:
        rank_zero_info(
            f"Losses at the global model take one forward pass per training batch: on client {client} the loss of "
            "several batches in one is not their mean (loss_batch_size of FederatedStrategy)"
        )
    return factor


def usable(
    uploads: Sequence[Upload],
    rows: UpdateRows,
    bank: BufferBank,
    rule: ClientRule,
    drop: Callable[[Upload, str, bool], None],
) -> UsableUploads:
    """Leaves out uploads that hold NaN or infinity.

    ``uploads`` come by ascending row, ``bank`` has the buffers before the round, and ``rule`` says what its extras may
    hold. ``drop`` is called with every upload that is left out, why, and whether any is left.
    """
    if not uploads:
        return UsableUploads([], torch.zeros(0, dtype=torch.float64), [])
    norms, losses = _magnitudes(uploads, rows)
    buffers = bank.finite([upload.buffers for upload in uploads]).tolist()
    companion_norms = rows.companion_norms([upload.index for upload in uploads])
    usable_places: list[int] = []
    flawed: list[tuple[Upload, str]] = []
    for place, upload in enumerate(uploads):
        loss, companions = losses[place], companion_norms[place]
        extras = _not_finite(upload.report.extras, rule)
        if not isfinite(float(norms[place])):
            flawed.append((upload, "its update is not finite"))
        elif loss is not None and not isfinite(loss):
            flawed.append((upload, f"its training loss is {loss}"))
        elif upload.loss is not None and not isfinite(upload.loss):
            flawed.append((upload, f"its loss at the global model is {upload.loss}"))
        elif not buffers[place]:
            flawed.append((upload, "its buffers are not finite"))
        elif not all(map(isfinite, companions.values())):
            flawed.append((upload, f"what it sends besides its update is not finite ({', '.join(companions)})"))
        elif extras:
            what = f"what {type(rule).__name__} sends besides its update"
            flawed.append((upload, f"{what} is not finite (extras {extras})"))
        else:
            usable_places.append(place)
    for upload, why in flawed:
        drop(upload, why, bool(usable_places))
    return UsableUploads(list(uploads), norms, losses).at(usable_places)


def stacked(parts: Sequence[Mapping[str, Tensor]], client_ids: Sequence[int], what: str) -> dict[str, Tensor]:
    """Joins what all clients sent under the same name: ``[m, ...]``; names and shapes must be the same from all."""
    shapes = [{name: tuple(value.shape) for name, value in part.items()} for part in parts]
    if any(shape != shapes[0] for shape in shapes):
        found = dict(zip(client_ids, shapes, strict=True))
        raise ValueError(f"{what} must have the same names and shapes from all clients, found {found}")
    return {name: torch.stack([part[name] for part in parts]) for name in shapes[0]}


def _not_finite(extras: Mapping[str, Tensor], rule: ClientRule) -> str:
    """Names of extras with infinity, or with NaN where the rule does not allow for it."""
    allowed = rule.undefined_extras
    sound = {k: v.isfinite() | v.isnan() if k in allowed else v.isfinite() for k, v in extras.items()}
    return ", ".join(repr(name) for name, each in sound.items() if not bool(each.all()))


def _magnitudes(uploads: Sequence[Upload], rows: UpdateRows) -> tuple[Tensor, list[float | None]]:
    """Norms and training losses, fetched from the device at once."""
    norms = rows.norms([upload.index for upload in uploads])
    losses = [upload.train_loss for upload in uploads if upload.train_loss is not None]
    given = [loss.detach().reshape(1).to(norms.device, norms.dtype) for loss in losses]
    fetched = torch.cat([norms, *given]).cpu()
    norms, remaining = fetched[: len(uploads)], iter(fetched[len(uploads) :].tolist())
    return norms, [None if upload.train_loss is None else next(remaining) for upload in uploads]


class Failures:
    """Follows ``on_client_error`` and ``max_failed_rounds``.

    ``skipped_rounds`` changed nothing. ``failed_rounds`` are those in a row, up to the last one, in which clients
    trained and nothing came of it: no upload was usable, or the step was refused.
    """

    names: Sequence[str]  # of all clients; whoever opens rounds knows them

    def __init__(self, options: FitOptions) -> None:
        self._options = options
        self.skipped_rounds, self.failed_rounds = 0, 0

    def drop(
        self, current: Round, client_id: int, reason: str, cause: Exception | None = None, any_usable: bool = True
    ) -> None:
        """Leaves a client out of the round with a warning, or raises, by policy; a fault of the module raises."""
        label = client_label(client_id, self.names)
        at_fault = isinstance(cause, ModuleError)
        if at_fault or self._options.on_client_error == "raise":
            succeeded = cause is None or bool(current.uploads) or current.index > 0
            hint = "no client has succeeded, so look at the module, its learning rate and the data"
            hint = "on_client_error='drop' leaves such clients out" if any_usable and succeeded else hint
            hint = "it is the module's fault" if at_fault else hint
            raise ClientError(f"client {label} in round {current.index}: {reason} ({hint})") from cause
        current.dropped[client_id] = reason
        rank_zero_warn(f"client {label} is left out of round {current.index}: {reason}")

    def refused(self, current: Round, reports: UsableUploads, flaw: str) -> RoundRecord:
        """The record of a round whose step was refused, or an error, by policy."""
        largest = reports.norms.sort(descending=True, stable=True).indices[:_NAMED].tolist()
        labels = [client_label(reports.uploads[place].client_id, self.names) for place in largest]
        norms = ", ".join(f"client {who} {float(reports.norms[k]):.3g}" for who, k in zip(labels, largest, strict=True))
        words = f"{flaw}; the largest norms of updates are {norms}"
        if self._options.on_client_error == "raise":
            raise ClientError(
                f"round {current.index}: {words}. The model stays as it was before the round "
                "(on_client_error='drop' goes on with the next one)"
            )
        return self.skipped(current, reports.uploads, f"was left out: {words}", flaw, failed=True)

    def skipped(self, current: Round, uploads: Sequence[Upload], event: str, reason: str, failed: bool) -> RoundRecord:
        """The record of a round that does not count, or an error after too many; what did arrive is left out."""
        failures = self.failed_rounds + 1 if failed else 0 if uploads else self.failed_rounds
        others = {u.client_id: f"the round had {reason}" for u in uploads if u.client_id not in current.dropped}
        dropped = {**current.dropped, **others}
        if failed and failures == self._options.max_failed_rounds:
            some = list(dropped.items())[:_NAMED]
            causes = "; ".join(f"client {client_label(client, self.names)}: {why}" for client, why in some)
            number = f"{failures} round{'s' * (failures > 1)} in a row"
            raise ClientError(
                f"{number} changed nothing although clients trained, up to round {current.index}, which {event} "
                f"({causes}). The model is that of the last round that counted; max_failed_rounds="
                f"{self._options.max_failed_rounds} of FederatedStrategy stops the fit here, None never does"
            )
        self.skipped_rounds, self.failed_rounds = self.skipped_rounds + 1, failures  # an error leaves both
        rank_zero_warn(f"round {current.index} {event}: the global model is unchanged")
        return trusted(RoundRecord)(
            current.index, (), dropped, nan, None, 0.0, torch.zeros(0), 0, {}, True, None, {}, current.seconds, reason,
            self.skipped_rounds,
        )  # fmt: skip
