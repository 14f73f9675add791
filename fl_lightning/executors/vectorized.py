# SPDX-License-Identifier: Apache-2.0
"""All clients of a round in one pass of ``torch.func`` over stacked parameters and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fl_lightning._lightning import rank_zero_info
from fl_lightning.algorithms.base import ClientReport
from fl_lightning.executors._chunk import FEW, Chunk
from fl_lightning.executors._cohort_batches import ClientSteps, steps_of
from fl_lightning.executors._elementwise import optimizer_obstacle
from fl_lightning.executors._levels import UnfitError
from fl_lightning.executors._stacked_step import StackedStep, rule_obstacle
from fl_lightning.executors._undone import RANDOM, undone
from fl_lightning.executors.base import Crew, Executor
from fl_lightning.reports import Arrival, with_accuracy
from fl_lightning.seeding import isolated

if TYPE_CHECKING:
    from fl_lightning.bench import Bench
    from fl_lightning.loop import ClientTask
_CHUNK_BYTES = {"cpu": 64 * 2**20}
"""Memory for the clients of one pass, by kind of device."""
_CHUNK_BYTES_ELSEWHERE = 2**31


@dataclass(frozen=True)
class Vectorized(Executor):
    """Trains many clients in one pass over stacked parameters: worth it for small models and large cohorts.

    Taken only where every client gets the weights that it would get alone, up to rounding: known optimizers that treat
    every number for itself, plain clients or FedProx's term, no hooks, no random numbers in training. Everything else
    is trained one by one; the reason is logged once and kept in ``FederatedStrategy.detour``. In every round, a step of
    two clients is compared with what the module itself computes.

    Args:
        clients_at_once: clients per pass; ``None``: as many as a moderate amount of memory holds.

    Raises:
        ValueError: ``clients_at_once`` is not positive.
    """

    clients_at_once: int | None = None

    def __post_init__(self) -> None:
        if self.clients_at_once is not None and self.clients_at_once < 1:
            raise ValueError(f"clients_at_once must be positive, found {self.clients_at_once}")

    def obstacle(self, bench: Bench) -> str | None:
        """See :meth:`Executor.obstacle`."""
        if bench.needs.full_gradients:
            return "clients upload full gradients and train nothing"
        if not bench.lean:
            return "hooks or options of the trainer watch every single step (see the path in the memory plan)"
        if bench.options.keep_client_optimizers:
            return "client_optimizer_state='keep' gives every client another state to begin with"
        if any(m._backward_hooks or m._backward_pre_hooks for m in bench.module.modules()):
            return "modules have backward hooks"
        return rule_obstacle(bench.rule) or optimizer_obstacle(bench.trainer.optimizers)

    def crew(self, bench: Bench) -> Crew:
        """Trains the whole round when its first client is asked for."""
        return Together(bench, self.clients_at_once)


class Together(Crew):
    """Trains the clients of a round in chunks, each in one pass.

    Args:
        bench: where single clients are trained.
        clients_at_once: clients per chunk.
    """

    def __init__(self, bench: Bench, clients_at_once: int | None) -> None:
        self._bench, self._limit = bench, clients_at_once
        self._tasks: list[ClientTask] = []
        self._trained: dict[int, ClientSteps] | None = None

    def begin_round(self, tasks: Sequence[ClientTask]) -> None:
        """Remembers the cohort."""
        self._tasks, self._trained = list(tasks), None

    def train(self, task: ClientTask) -> Arrival:
        """Trains all clients with the first one; hands over this one's results."""
        bench = self._bench
        if self._trained is None:
            self._trained = {} if bench.detour is not None else self._train_all()
        client = self._trained.pop(task.index, None)
        return bench.visit(task) if client is None else self._hand_over(client)

    def end_round(self) -> None:
        """Forgets the round."""
        self._tasks, self._trained = [], None

    def close(self) -> None:
        """Forgets the round."""
        self.end_round()

    # ---- a round

    def _train_all(self) -> dict[int, ClientSteps]:
        """What the clients left behind by row; clients whose data raises, or all if they are unfit, are not there."""
        bench = self._bench
        reason = Vectorized().obstacle(bench)  # hooks may have come
        if reason is None:
            try:
                with isolated(0, bench.binding.theta.device):
                    return self._in_chunks()
            except UnfitError as error:
                reason = str(error)  # if it is a client's own error, it will raise it again alone
            finally:
                bench.tidy()
        bench.detour = reason
        rank_zero_info(f"Vectorized trains clients one after the other from now on: {reason}")
        return {}

    def _in_chunks(self) -> dict[int, ClientSteps]:
        bench = self._bench
        with undone(bench.module, bench.binding.theta.device) as traces:
            try:
                done = self._trained_chunks()
            except Exception as error:
                # A trace says more than what became of it.
                raise UnfitError(traces() or _reason(error)) from error
            found = traces()
            if found is not None:
                raise UnfitError(found)
            return done

    def _trained_chunks(self) -> dict[int, ClientSteps]:
        bench, done, unchecked = self._bench, dict[int, ClientSteps](), {True, False}
        binding = bench.binding
        step = StackedStep(bench.module, bench.local, bench.rule, binding.parameters, binding.layout, binding.theta)
        # Alike clients side by side: those that end first are then the last of their chunk.
        clients = sorted(self._plans(), key=lambda client: (len(client), client.sizes), reverse=True)
        while clients:
            number = min(self._limit or _fitting(bench, clients[0]), len(clients))
            try:
                Chunk(bench, step, clients[:number], unchecked).train()
            except torch.OutOfMemoryError:
                if number == 1:
                    raise
                self._limit = number // 2
                continue
            done |= {client.task.index: client for client in clients[:number]}
            clients = clients[number:]
        return done

    def _plans(self) -> list[ClientSteps]:
        plans = []
        for task in self._tasks:
            try:
                plan = steps_of(self._bench, task)
            except Exception:
                continue  # it is raised again when the client trains alone
            if len(plan) > 0:
                plans.append(plan)
        return plans

    def _hand_over(self, client: ClientSteps) -> Arrival:
        bench, task = self._bench, client.task
        assert task.client_id is not None
        asks = bench.needs.losses or bench.needs.accuracies
        measured = bench.measure(task.client_id, task.round) if asks else {}
        bench.log(client.calls)
        bench.count(len(client))
        bench.falsify(task)
        report = ClientReport()
        if bench.needs.accuracies:
            report = with_accuracy(report, measured["accuracy"], bench.module)
        with torch.no_grad():
            for buffer, value in client.buffers:
                buffer.copy_(value)
        return Arrival(
            task.index, task.client_id, task.num_samples, client.loss,
            measured.get("loss") if bench.needs.losses else None, report, bench.server.bank.report(task.num_samples),
        )  # fmt: skip


def _reason(error: Exception) -> str:
    if isinstance(error, UnfitError):
        return str(error)
    message = (str(error).strip().splitlines() or [""])[0][:300]
    if "randomness error mode" in message:
        return RANDOM
    return f"{type(error).__name__} in a pass over several clients: {message}"


def _fitting(bench: Bench, client: ClientSteps) -> int:
    """Clients per chunk: parameters, gradients, two numbers of optimizer state, and a batch with its activations."""
    theta = bench.binding.theta
    budget = _CHUNK_BYTES.get(theta.device.type, _CHUNK_BYTES_ELSEWHERE)
    return max(FEW, budget // (4 * theta.numel() * theta.element_size() + 2 * client.batch_bytes(bench)))
