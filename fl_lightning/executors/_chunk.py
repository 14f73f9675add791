# SPDX-License-Identifier: Apache-2.0
"""Local training of a few clients at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.bench import Bench
from fl_lightning.executors._cohort_batches import ClientSteps, Stacker
from fl_lightning.executors._elementwise import StackedOptimizer
from fl_lightning.executors._levels import UnfitError
from fl_lightning.executors._stacked_logs import StackedLogs
from fl_lightning.executors._stacked_step import StackedStep, StepResult

FEW = 3
"""Fewer clients than this take a step one by one: a pass over several costs as much as four or five single ones."""


class Chunk:
    """Some clients with their parameters, buffers and optimizer state stacked.

    Args:
        bench: module, optimizers and the update matrix.
        step: the module's training step.
        clients: the clients, those with more steps first.
        unchecked: ways of taking a step, together (True) and alone (False), that are yet to be compared with what the
            module itself computes; what is compared is taken out.
    """

    def __init__(self, bench: Bench, step: StackedStep, clients: Sequence[ClientSteps], unchecked: set[bool]) -> None:
        self._bench, self._step, self._clients, self._unchecked = bench, step, clients, unchecked
        bench.optimizers.restore()
        number, binding = len(clients), bench.binding
        theta = binding.layout.views(binding.theta)
        self._theta = theta
        # Not views of the rows: tensors without gaps are faster.
        self._all = [view.expand(number, *view.shape).clone() for view in theta]
        self._leaves = self._all
        self._buffers = [buffer.detach().expand(number, *buffer.shape).clone() for buffer in step.buffers]
        self._optimizer = StackedOptimizer(bench.trainer.optimizers[0], binding.parameters, self._all)
        self._stacker = Stacker(bench, clients)
        self._losses: Tensor | None = None
        self._logs = StackedLogs([client.sizes for client in clients])

    def train(self) -> None:
        """Trains the clients; their updates are in the update matrix afterwards, everything else in ``clients``."""
        clients, active = self._clients, len(self._clients)
        for index in range(len(clients[0])):
            still = active
            while len(clients[still - 1]) <= index:
                still -= 1
            if still < active:
                self._leaves, active = self._optimizer.keep(still), still
            self._optimizer.step(self._gradients(index, active))
        self._finish()

    # ---- a step

    def _gradients(self, index: int, active: int) -> list[Tensor | None]:
        parties = [
            some
            for chosen in self._stacker.groups(index, active)
            for some in ([chosen] if len(chosen) >= FEW else [[k] for k in chosen])
        ]
        found: list[tuple[Sequence[int], StepResult]] = []
        with self._optimizer.same_options(len(parties)) as again:
            for some in parties:
                again()
                result = self._take(some, index)
                self._keep(some, index, result)
                found.append((some, result))
        if len(found) == 1:
            return found[0][1].gradients
        parts = [[(chosen, result.gradients[place]) for chosen, result in found] for place in range(len(self._leaves))]
        same = self._optimizer.ignores_zeros
        return [_joined(leaf, some, same) for leaf, some in zip(self._leaves, parts, strict=True)]

    def _take(self, chosen: Sequence[int], index: int) -> StepResult:
        client = self._clients[chosen[0]]
        where, position, together = _index(chosen), client.indices[index], len(chosen) >= FEW
        if together:
            leaves, buffers = [p[where] for p in self._leaves], [b[where] for b in self._buffers]
            result = self._step.together(leaves, buffers, self._stacker.stacked(chosen, index), position)
        else:
            k = chosen[0]
            leaves, buffers = [p[k] for p in self._leaves], self._of(k)
            result = self._step.alone(leaves, buffers, self._stacker.single(k, index), position)
        # After one step the clients' parameters differ, so that mixing them up would show.
        if together in self._unchecked and (index > 0 or len(client) == 1):
            self._unchecked.remove(together)
            for place in {0, len(chosen) - 1}:
                self._compare(chosen[place], place, index, result)
        return result

    def _of(self, k: int) -> list[Tensor]:
        return [buffer[k] for buffer in self._buffers]

    def _keep(self, chosen: Sequence[int], index: int, result: StepResult) -> None:
        if self._losses is None:
            shape = len(self._clients), len(self._clients[0])
            self._losses = result.losses.new_zeros(shape)
        where = _index(chosen)
        self._losses[where, index] = result.losses
        for buffer, value in zip(self._buffers, result.buffers, strict=True):
            buffer[where] = value
        self._logs.add(index, chosen, result.logged)

    def _finish(self) -> None:
        clients = self._clients
        assert self._losses is not None
        wide = self._losses if self._losses.dtype.itemsize > 2 else self._losses.float()
        steps = wide.shape[1]
        sizes = torch.tensor([c.sizes + [0] * (steps - len(c)) for c in clients], dtype=wide.dtype, device=wide.device)
        means = (wide * sizes).sum(1) / sizes.sum(1)
        rows, start = self._bench.server.rows, 0
        where = torch.tensor([client.task.index for client in clients], device=rows.device)
        for view, trained in zip(self._theta, self._all, strict=True):
            stop = start + view.numel()
            rows[where, start:stop] = (view - trained).reshape(len(clients), -1)
            start = stop
        for k, (client, calls) in enumerate(zip(clients, self._logs.calls(), strict=True)):
            client.loss, client.calls = means[k], calls
            client.buffers = list(zip(self._step.buffers, self._of(k), strict=True))

    # ---- the comparison

    def _compare(self, k: int, place: int, index: int, result: StepResult) -> None:
        """Compares a client's part of a step with the step of the module itself.

        Raises:
            UnfitError: they differ by more than rounding.
        """
        binding = self._bench.binding
        batch, position = self._stacker.single(k, index), self._clients[k].indices[index]
        binding.bind([leaf[k].contiguous() for leaf in self._leaves])
        try:
            loss, buffers = self._step.plain(batch, self._of(k), position)
            expected = torch.autograd.grad(loss, binding.parameters, allow_unused=True)
        finally:
            binding.bind_global()
        pairs = [(loss.detach(), result.losses[place])]
        for parameter, a, found in zip(binding.parameters, expected, result.gradients, strict=True):
            zero = torch.zeros_like(parameter)
            pairs.append((zero if a is None else a, zero if found is None else found[place]))
        pairs += [(a, b[place]) for a, b in zip(buffers, result.buffers, strict=True)]
        if not close(pairs):
            raise UnfitError("a pass over several clients gave other gradients than the clients alone")


def close(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether pairs of tensors agree up to rounding, measured by their norms.

    Not number by number: where rounding moves a unit over the kink of a ReLU, single gradients differ by more.
    """
    floats = [(a, b) for a, b in pairs if a.is_floating_point()]
    largest = max((float(_norm(a)) for a, _ in floats), default=0.0)
    for a, b in pairs:
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return False
            continue
        if not torch.equal(a.isfinite(), b.isfinite()):
            return False
        # Convolutions on accelerators may run in reduced precision.
        narrow = 2e-3 if a.device.type == "cpu" else 2e-2
        tolerance = 1e-7 if a.dtype == torch.float64 else narrow
        if float(_norm(a - b)) > tolerance * (float(_norm(a)) + 1e-3 * largest):
            return False
    return True


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.nan_to_num(tensor, 0.0, 0.0, 0.0))
    return norm


def _joined(leaf: Tensor, parts: Sequence[tuple[Sequence[int], Tensor | None]], zeros: bool) -> Tensor | None:
    """The gradients of all clients from those of some at a time; ``zeros`` may stand for none."""
    if all(gradient is None for _, gradient in parts):
        return None
    whole = torch.empty_like(leaf)
    for chosen, gradient in parts:
        if gradient is None and not zeros:
            raise UnfitError("the loss depends on a parameter in some batches and not in others")
        whole[_index(chosen)] = 0.0 if gradient is None else gradient
    return whole


def _index(chosen: Sequence[int]) -> slice | list[int]:
    """A slice where it can be one: it copies nothing."""
    first, stop = chosen[0], chosen[-1] + 1
    return slice(first, stop) if stop - first == len(chosen) else list(chosen)
