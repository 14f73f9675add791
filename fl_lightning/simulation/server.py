# SPDX-License-Identifier: Apache-2.0
"""The server's side of a round: collect reports, aggregate, apply the step, write down what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, signature
from math import isfinite, nan

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.algorithms.base import ClientRule, ServerRule, StepReport
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.errors import ClientError
from fl_lightning.core.lightning.names import rank_zero_warn
from fl_lightning.core.records import RoundRecord
from fl_lightning.core.updates import UpdateMatrix
from fl_lightning.metrics.functional import conflict_counts
from fl_lightning.simulation.uploads import ErrorPolicy, Round, UsableUploads, norm_of, stacked, usable
from fl_lightning.training.bound_parameters import BoundParameters
from fl_lightning.training.buffers import BufferBank
from fl_lightning.training.upload import Upload

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


class Server:
    """Holds the update matrix and turns a round's reports into new global parameters.

    Args:
        algorithm: the server rule.
        client_rule: the client rule, whose server half is committed with the step.
        binding: the bound module.
        bank: its buffers.
        capacity: the largest number of clients in a round.
        num_clients: registered clients.
        optimizer: factory of a server optimizer; ``None`` subtracts the step.
        on_client_error: what to do about clients whose report is missing or not finite.
        allocate: gives memory for the update matrix, from the number of rows and the global parameters.

    Raises:
        MemoryError: the update matrix does not fit on the device.
        TypeError: ``optimizer`` does not make an optimizer.
    """

    def __init__(
        self,
        algorithm: ServerRule,
        client_rule: ClientRule,
        binding: BoundParameters,
        bank: BufferBank,
        capacity: int,
        num_clients: int,
        optimizer: OptimizerFactory | None,
        on_client_error: ErrorPolicy,
        allocate: Callable[[int, Tensor], Tensor] | None = None,
    ) -> None:
        self._algorithm, self._rule = algorithm, client_rule
        self._binding, self.bank = binding, bank
        self._num_clients = num_clients
        self._policy = on_client_error
        theta = binding.theta
        try:
            self.rows = (allocate or _rows)(capacity, theta)
        except RuntimeError as error:  # torch.OutOfMemoryError on accelerators
            size = capacity * theta.numel() * theta.element_size()
            raise MemoryError(
                f"the updates of clients_per_round={capacity} clients need {size:,} B on {theta.device}: sample fewer"
            ) from error
        self._views = [binding.layout.views(row) for row in self.rows]
        self.optimizer = None if optimizer is None else _made(optimizer, binding.parameters)

    def open_row(self, index: int) -> Tensor:
        """Fills row ``index`` with the global parameters and binds the module to it."""
        row = self.rows[index]
        row.copy_(self._binding.theta)
        self._binding.bind(self._views[index])
        return row

    def settle_row(self, index: int) -> None:
        """Makes row ``index`` hold the trained parameters also where local training moved them to another storage."""
        self._binding.settle(self._views[index])

    def close_row(self, index: int) -> None:
        """Turns the trained parameters in row ``index`` into an update, and puts the global model back."""
        row = self.rows[index]
        torch.sub(self._binding.theta, row, out=row)
        self._binding.bind_global()

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
        if self._policy == "raise":
            hint = "on_client_error='drop' leaves such clients out"
            raise ClientError(f"client {client_id} in round {current.index}: {reason} ({hint})") from cause
        current.dropped[client_id] = reason
        rank_zero_warn(f"client {client_id} is left out of round {current.index}: {reason}")

    def close(
        self,
        current: Round,
        client_lr: float | None,
        losses_at: Callable[[Tensor, Sequence[int]], Tensor] | None,
        seconds: Callable[[], float],
    ) -> RoundRecord:
        """Aggregates the round and applies the step; without any usable report the global model stays as it is."""
        reports = usable(
            current.arrivals, self.rows, self.bank, lambda arrival, why: self.drop(current, arrival.client_id, why)
        )
        arrivals = reports.arrivals
        if not arrivals:
            return RoundRecord(
                current.index, (), dict(current.dropped), nan, None, 0.0, torch.zeros(0), 0, {}, True, None, {},
                seconds(),
            )  # fmt: skip
        ids = tuple(arrival.client_id for arrival in arrivals)
        ask = None if losses_at is None else (lambda params: losses_at(params, ids))
        cohort = self._cohort(current.index, arrivals, client_lr, ask)
        self._algorithm.report = StepReport()
        step = self._rule.adjust_step(cohort, self._algorithm.aggregate(cohort))
        step_norm = norm_of(step) if step.dim() == 1 else nan
        if step.shape != self._binding.theta.shape or not isfinite(step_norm):
            raise RuntimeError(
                f"{type(self._algorithm).__name__}.aggregate must return a finite step of shape "
                f"{tuple(self._binding.theta.shape)}, found shape {tuple(step.shape)}, norm {step_norm}"
            )
        dots = cohort.updates.dots(step).cpu()
        self._rule.commit(cohort)
        self._apply(step)
        self.bank.commit([arrival.buffers for arrival in arrivals])
        return self._record(current, cohort, step_norm, reports, dots, seconds)

    def _cohort(
        self,
        index: int,
        arrivals: Sequence[Upload],
        client_lr: float | None,
        losses_at: Callable[[Tensor], Tensor] | None,
    ) -> Cohort:
        layout = self._binding.layout
        ids, rule = tuple(arrival.client_id for arrival in arrivals), type(self._rule).__name__
        extras = stacked([arrival.report.extras for arrival in arrivals], ids, f"extras of {rule}")
        companions = stacked([arrival.report.companions for arrival in arrivals], ids, f"companions of {rule}")
        losses = [arrival.loss for arrival in arrivals if arrival.loss is not None]
        return Cohort(
            params=self._binding.theta,
            updates=UpdateMatrix(self.rows[: len(arrivals)], layout),
            losses=torch.tensor(losses, dtype=torch.float64) if len(losses) == len(arrivals) else None,
            sizes=torch.tensor([arrival.size for arrival in arrivals]),
            client_ids=ids,
            round=index,
            client_lr=client_lr,
            num_clients=self._num_clients,
            extras=extras,
            companions={name: UpdateMatrix(rows, layout) for name, rows in companions.items()},
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
        model, per_layer = conflict_counts(dots)
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
            conflicts=int(model),
            layer_conflicts=dict(zip(layout.layer_names, per_layer.tolist(), strict=True)),
            flagged=report.flagged,
            weights=report.weights,
            scalars=dict(report.scalars),
            seconds=seconds(),
        )


def _rows(number: int, like: Tensor) -> Tensor:
    return torch.empty(number, like.numel(), dtype=like.dtype, device=like.device)


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
