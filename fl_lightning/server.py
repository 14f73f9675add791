# SPDX-License-Identifier: Apache-2.0
"""The server's side of a round: collect reports, aggregate, apply the step, write down what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite, nan
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.algorithms.base import ClientReport, ClientRule, ServerRule, StepReport
from fl_lightning.binding import Binding, BufferBank, BufferReport
from fl_lightning.cohort import Cohort
from fl_lightning.metrics.functional import conflict_counts
from fl_lightning.records import RoundRecord
from fl_lightning.updates import UpdateMatrix

ErrorPolicy = Literal["raise", "drop"]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


class ClientError(RuntimeError):
    """A client could not contribute to a round; the message names it and says why."""


@dataclass(frozen=True)
class Arrival:
    """One client's report as it reached the server.

    Attributes:
        index: its row in the update matrix.
        client_id: the client.
        size: training samples.
        train_loss: mean local training loss, if the module reported one.
        loss: loss at the global parameters before training, if asked for.
        report: extras and companions of the client rule.
        buffers: the client's buffers.
    """

    index: int
    client_id: int
    size: int
    train_loss: Tensor | None
    loss: float | None
    report: ClientReport
    buffers: BufferReport


@dataclass
class Round:
    """A round in progress."""

    index: int
    arrivals: list[Arrival] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)


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
    """

    def __init__(
        self,
        algorithm: ServerRule,
        client_rule: ClientRule,
        binding: Binding,
        bank: BufferBank,
        capacity: int,
        num_clients: int,
        optimizer: OptimizerFactory | None,
        on_client_error: ErrorPolicy,
    ) -> None:
        self._algorithm, self._rule = algorithm, client_rule
        self._binding, self.bank = binding, bank
        self._num_clients = num_clients
        self._policy = on_client_error
        theta = binding.theta
        self.rows = torch.empty(capacity, theta.numel(), dtype=theta.dtype, device=theta.device)
        self._views = [binding.layout.views(row) for row in self.rows]
        self.optimizer = None if optimizer is None else optimizer(binding.parameters)

    def open_row(self, index: int) -> Tensor:
        """Fills row ``index`` with the global parameters and binds the module to it."""
        row = self.rows[index]
        row.copy_(self._binding.theta)
        self._binding.bind(self._views[index])
        return row

    def close_row(self, index: int) -> None:
        """Turns the trained parameters in row ``index`` into an update, and puts the global model back."""
        row = self.rows[index]
        torch.sub(self._binding.theta, row, out=row)
        self._binding.bind_global()

    def drop(self, current: Round, client_id: int, reason: str) -> None:
        """Leaves a client out of the round, or raises, by policy.

        Raises:
            ClientError: the policy is ``"raise"``.
        """
        if self._policy == "raise":
            raise ClientError(
                f"client {client_id} in round {current.index}: {reason} (on_client_error='drop' leaves such clients out)"
            )
        current.dropped[client_id] = reason

    def close(
        self,
        current: Round,
        client_lr: float | None,
        losses_at: Callable[[Tensor, Sequence[int]], Tensor] | None,
        seconds: Callable[[], float],
    ) -> RoundRecord:
        """Aggregates the round and applies the step."""
        arrivals, norms = self._finite(current)
        if not arrivals:
            return RoundRecord(
                current.index, (), dict(current.dropped), nan, None, 0.0, torch.zeros(0), 0, {}, (), 0, True, None,
                {}, seconds(),
            )  # fmt: skip
        ids = tuple(arrival.client_id for arrival in arrivals)
        ask = None if losses_at is None else (lambda params: losses_at(params, ids))
        cohort = self._cohort(current.index, arrivals, client_lr, ask)
        self._algorithm.report = StepReport()
        step = self._algorithm.aggregate(cohort)
        step_norm = float(torch.linalg.vector_norm(step, dtype=torch.float64))
        if step.shape != self._binding.theta.shape or not isfinite(step_norm):
            raise RuntimeError(
                f"{type(self._algorithm).__name__}.aggregate must return a finite step of shape "
                f"{tuple(self._binding.theta.shape)}, found shape {tuple(step.shape)}, norm {step_norm}"
            )
        dots = cohort.updates.dots(step)
        self._rule.commit(cohort)
        self._apply(step)
        self.bank.commit([arrival.buffers for arrival in arrivals])
        return self._record(current, arrivals, cohort, step_norm, norms, dots, seconds)

    def _finite(self, current: Round) -> tuple[list[Arrival], Tensor]:
        arrivals = current.arrivals
        if not arrivals:
            return [], torch.zeros(0)
        rows = self._used_rows(arrivals)
        norms = torch.linalg.vector_norm(rows, dim=1).cpu()
        kept = []
        for place, arrival in enumerate(arrivals):
            if not isfinite(float(norms[place])):
                self.drop(current, arrival.client_id, "its update is not finite")
            elif arrival.loss is not None and not isfinite(arrival.loss):
                self.drop(current, arrival.client_id, f"its loss at the global model is {arrival.loss}")
            else:
                kept.append(place)
        return [arrivals[place] for place in kept], norms[kept].double()

    def _used_rows(self, arrivals: Sequence[Arrival]) -> Tensor:
        used = [arrival.index for arrival in arrivals]
        return self.rows[: len(used)] if used == list(range(len(used))) else self.rows[used]

    def _cohort(
        self,
        index: int,
        arrivals: Sequence[Arrival],
        client_lr: float | None,
        losses_at: Callable[[Tensor], Tensor] | None,
    ) -> Cohort:
        rows = self._used_rows(arrivals)
        layout = self._binding.layout
        first = arrivals[0].report
        losses = [arrival.loss for arrival in arrivals if arrival.loss is not None]
        return Cohort(
            params=self._binding.theta,
            updates=UpdateMatrix(rows, layout),
            losses=torch.tensor(losses, dtype=torch.float64) if len(losses) == len(arrivals) else None,
            sizes=torch.tensor([arrival.size for arrival in arrivals]),
            client_ids=tuple(arrival.client_id for arrival in arrivals),
            round=index,
            client_lr=client_lr,
            num_clients=self._num_clients,
            extras={name: torch.stack([a.report.extras[name] for a in arrivals]) for name in first.extras},
            companions={
                name: UpdateMatrix(torch.stack([a.report.companions[name] for a in arrivals]), layout)
                for name in first.companions
            },
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
        arrivals: Sequence[Arrival],
        cohort: Cohort,
        step_norm: float,
        norms: Tensor,
        dots: Tensor,
        seconds: Callable[[], float],
    ) -> RoundRecord:
        report, layout = self._algorithm.report, self._binding.layout
        blocks = report.blocks or tuple((layer,) for layer in range(layout.num_layers))
        model, per_layer = conflict_counts(dots)
        per_block = [int((dots[list(block)].sum(0) < 0).sum()) for block in blocks]
        trained = [(a.train_loss, a.size) for a in arrivals if a.train_loss is not None]
        train_loss = nan
        if trained:
            train_loss = sum(float(loss) * size for loss, size in trained) / sum(size for _, size in trained)
        return RoundRecord(
            round=current.index,
            client_ids=cohort.client_ids,
            dropped=dict(current.dropped),
            train_loss=train_loss,
            losses=cohort.losses,
            step_norm=step_norm,
            update_norms=norms,
            conflicts=int(model),
            layer_conflicts=dict(zip(layout.layer_names, per_layer.tolist(), strict=True)),
            block_conflicts=tuple(per_block),
            merged_layers=sum(len(block) for block in blocks if len(block) > 1),
            flagged=report.flagged,
            weights=report.weights,
            scalars=dict(report.scalars),
            seconds=seconds(),
        )


def cohort_size(clients_per_round: int | float, num_clients: int) -> int:
    """The number of clients in a round: an int is a count, a float a fraction (rounded up).

    Raises:
        ValueError: the count or fraction is out of range.
    """
    if isinstance(clients_per_round, bool) or clients_per_round <= 0:
        raise ValueError(f"clients_per_round must be a positive count or fraction, found {clients_per_round!r}")
    if isinstance(clients_per_round, int):
        if clients_per_round > num_clients:
            raise ValueError(f"clients_per_round must be at most the {num_clients} clients, found {clients_per_round}")
        return clients_per_round
    if clients_per_round > 1:
        raise ValueError(f"clients_per_round as a fraction must be at most 1, found {clients_per_round}")
    # Guards against 0.1 * 30 = 3.0000000000000004 becoming 4.
    return max(1, ceil(round(clients_per_round * num_clients, 9)))


def round_metrics(record: RoundRecord, listed: int = 100) -> Mapping[str, float]:
    """The numbers of a round under the names of docs/logged.md; per-client ones for at most ``listed`` clients."""
    metrics: dict[str, Any] = {
        "fed/train_loss": record.train_loss,
        "fed/step_norm": record.step_norm,
        "fed/update_norm": float(record.update_norms.mean()) if record.client_ids else 0.0,
        "fed/conflicts": record.conflicts,
        "fed/merged_layers": record.merged_layers,
        "fed/flagged": float(record.flagged),
        "fed/clients": len(record.client_ids),
        "fed/dropped": len(record.dropped),
        "fed/seconds": record.seconds,
    }
    metrics |= {f"fed/conflicts/{name}": count for name, count in record.layer_conflicts.items()}
    if record.losses is not None:
        metrics["fed/loss"] = float(record.losses.mean())
        metrics["fed/loss/max"] = float(record.losses.max())
    if record.weights is not None:
        weights = record.weights.tolist()
        metrics |= {"fed/weight/min": min(weights), "fed/weight/max": max(weights)}
        if len(weights) <= listed:
            metrics |= {f"fed/client/{slot}": client for slot, client in enumerate(record.client_ids)}
            metrics |= {f"fed/weight/{slot}": weight for slot, weight in enumerate(weights)}
    return metrics | {f"fed/{name}": value for name, value in record.scalars.items()}
