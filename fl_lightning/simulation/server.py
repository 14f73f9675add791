# SPDX-License-Identifier: Apache-2.0
"""The server's side of a round: check uploads, aggregate, apply the step, record what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, signature
from math import isfinite, nan

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.records import StepReport, mean_rate
from fl_lightning.core.aligned import stacked_rows
from fl_lightning.core.client_names import client_label, numbered
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.errors import ClientError
from fl_lightning.core.lightning.names import rank_zero_warn
from fl_lightning.core.records import RoundRecord
from fl_lightning.core.updates import UpdateMatrix
from fl_lightning.metrics.functional import conflict_counts
from fl_lightning.simulation.uploads import ErrorPolicy, Round, UsableUploads, stacked, usable
from fl_lightning.training.bound_parameters import BoundParameters
from fl_lightning.training.buffers import BufferBank
from fl_lightning.training.update_rows import UpdateRows
from fl_lightning.training.upload import Upload

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


class Server:
    """Turns a round's uploads into new global parameters.

    Args:
        algorithm: the server rule.
        client_rule: the client rule, whose server half is committed with the step.
        binding: the bound module, whose global parameters take the step.
        buffers: the module's buffers.
        num_clients: registered clients.
        optimizer: factory of a server optimizer; ``None`` subtracts the step.
        on_client_error: what to do about clients whose upload is missing or not finite.
        min_clients: fewest usable uploads with which a round counts.

    Attributes:
        optimizer: the server optimizer, if there is one.
        skipped_rounds: rounds that changed nothing, having had too few usable uploads.
        names: what people call the clients.

    Raises:
        TypeError: ``optimizer`` does not make an optimizer.
    """

    def __init__(
        self,
        algorithm: ServerRule,
        client_rule: ClientRule,
        binding: BoundParameters,
        buffers: BufferBank,
        num_clients: int,
        optimizer: OptimizerFactory | None,
        on_client_error: ErrorPolicy,
        min_clients: int,
    ) -> None:
        self._algorithm, self._rule = algorithm, client_rule
        self._binding, self._buffers = binding, buffers
        self._num_clients, self._policy, self._min_clients = num_clients, on_client_error, min_clients
        self.skipped_rounds = 0
        self.optimizer = None if optimizer is None else _made(optimizer, binding.parameters)
        self.names = numbered(num_clients)

    def drop(self, current: Round, client_id: int, reason: str, cause: Exception | None = None) -> None:
        """Leaves a client out of the round with a warning, or raises, by policy.

        Args:
            current: the round.
            client_id: the client.
            reason: why.
            cause: what its training raised, if anything.

        Raises:
            ClientError: the policy is ``"raise"``.
        """
        label = client_label(client_id, self.names)
        if self._policy == "raise":
            hint = "on_client_error='drop' leaves such clients out"
            raise ClientError(f"client {label} in round {current.index}: {reason} ({hint})") from cause
        current.dropped[client_id] = reason
        rank_zero_warn(f"client {label} is left out of round {current.index}: {reason}")

    def close_round(
        self,
        current: Round,
        rows: UpdateRows,
        losses_at: Callable[[Tensor, Sequence[int]], Tensor] | None,
        seconds: Callable[[], float],
    ) -> RoundRecord:
        """Aggregates the round and applies the step; with too few usable uploads everything stays as it is.

        Args:
            current: the round, with what arrived.
            rows: the round's rows.
            losses_at: losses of clients at given parameters, for rules that ask again.
            seconds: how long the round has taken.
        """
        reports = usable(
            current.uploads, rows, self._buffers, lambda upload, why: self.drop(current, upload.client_id, why)
        )
        if len(reports.uploads) < self._min_clients:
            return self._skip(current, reports.uploads, seconds)
        ids = tuple(upload.client_id for upload in reports.uploads)
        ask = None if losses_at is None else (lambda params: losses_at(params, ids))
        updates = rows.gathered([upload.index for upload in reports.uploads], reports.norms)
        cohort = self._cohort(current.index, reports.uploads, updates, ask)
        step, step_norm = self._aggregate(cohort)
        dots = cohort.updates.dots(step).cpu()
        self._rule.commit(cohort)
        for upload in reports.uploads:
            if upload.report.kept:
                self._rule.keep(upload.client_id, upload.report.kept, current.index)
        self._apply(step)
        self._buffers.commit([upload.buffers for upload in reports.uploads])
        return self._record(current, cohort, step_norm, reports, dots, seconds)

    def _aggregate(self, cohort: Cohort) -> tuple[Tensor, float]:
        """The step ``[n]`` and its norm.

        Raises:
            RuntimeError: the rule returned something else than a finite step.
        """
        self._algorithm.report = StepReport()
        step = self._rule.adjust_step(cohort, self._algorithm.aggregate(cohort))
        fits = step.shape == cohort.params.shape and step.is_floating_point()
        norm = float(cohort.updates.norm_of(step)) if fits else nan
        if not isfinite(norm):
            raise RuntimeError(
                f"{type(self._algorithm).__name__}.aggregate must return a finite step of shape "
                f"{tuple(self._binding.theta.shape)}, found shape {tuple(step.shape)}, norm {norm}"
            )
        return step, norm

    def _cohort(
        self,
        index: int,
        uploads: Sequence[Upload],
        updates: UpdateMatrix,
        losses_at: Callable[[Tensor], Tensor] | None,
    ) -> Cohort:
        ids, rule = tuple(upload.client_id for upload in uploads), type(self._rule).__name__
        extras = stacked([upload.report.extras for upload in uploads], ids, f"extras of {rule}")
        sent = [upload.report.companions for upload in uploads]
        companions = stacked(sent, ids, f"companions of {rule}", stacked_rows)
        rates = [upload.client_lr for upload in uploads if upload.client_lr is not None]
        losses = [upload.loss for upload in uploads if upload.loss is not None]
        return Cohort(
            params=self._binding.theta,
            updates=updates,
            losses=torch.tensor(losses, dtype=torch.float64) if len(losses) == len(uploads) else None,
            sizes=torch.tensor([upload.size for upload in uploads]),
            client_ids=ids,
            round=index,
            client_lr=mean_rate(rates) if len(rates) == len(uploads) else None,
            num_clients=self._num_clients,
            extras=extras,
            companions={name: updates.beside(rows) for name, rows in companions.items()},
            losses_at=losses_at,
        )

    @torch.no_grad()
    def _apply(self, step: Tensor) -> None:
        if self.optimizer is None:
            self._binding.theta.sub_(step)
            return
        for parameter, gradient in zip(self._binding.parameters, self._binding.layout.views(step), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        self.optimizer.step()
        for parameter in self._binding.parameters:
            parameter.grad = None

    def _record(
        self,
        current: Round,
        cohort: Cohort,
        step_norm: float,
        reports: UsableUploads,
        dots: Tensor,
        seconds: Callable[[], float],
    ) -> RoundRecord:
        report, layout = self._algorithm.report, self._binding.layout
        counts = conflict_counts(dots)
        sizes = cohort.sizes.tolist()
        trained = [(loss, size) for loss, size in zip(reports.train_losses, sizes, strict=True) if loss is not None]
        train_loss = nan
        if trained:
            train_loss = sum(loss * size for loss, size in trained) / sum(size for _, size in trained)
        return RoundRecord(
            round=current.index,
            client_ids=cohort.client_ids,
            dropped=dict(current.dropped),
            train_loss=train_loss,
            losses=cohort.losses,
            step_norm=step_norm,
            update_norms=reports.norms,
            conflicts=int(counts.model),
            layer_conflicts=dict(zip(layout.layer_names, counts.layers.tolist(), strict=True)),
            flagged=report.flagged,
            weights=report.weights,
            scalars=dict(report.scalars),
            seconds=seconds(),
            skipped_rounds=self.skipped_rounds,
            client_names=tuple(self.names[client] for client in cohort.client_ids),
        )

    def _skip(self, current: Round, uploads: Sequence[Upload], seconds: Callable[[], float]) -> RoundRecord:
        """The record of a round that does not count; what did arrive is left out like everybody else."""
        self.skipped_rounds += 1
        count = len(uploads)
        reason = f"{count} usable report{'s' * (count > 1)}, fewer than min_clients={self._min_clients}"
        reason = reason if uploads else "no usable report"
        dropped = {**current.dropped, **{upload.client_id: f"the round had {reason}" for upload in uploads}}
        rank_zero_warn(f"round {current.index} had {reason}: the global model is unchanged")
        return RoundRecord(
            current.index, (), dropped, nan, None, 0.0, torch.zeros(0), 0, {}, True, None, {}, seconds(), reason,
            self.skipped_rounds,
        )  # fmt: skip


def _made(factory: OptimizerFactory, parameters: list[nn.Parameter]) -> Optimizer:
    optimizer = factory(parameters)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"server_optimizer must make a torch.optim.Optimizer from parameters, found {type(optimizer).__name__}: "
            "pass functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9), for instance"
        )
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ValueError(
            "server_optimizer must make an optimizer that steps on one gradient, the server's step, found "
            f"{type(optimizer).__name__}, whose step needs a closure: take torch.optim.SGD or Adam, for instance"
        )
    return optimizer
