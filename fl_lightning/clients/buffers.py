# SPDX-License-Identifier: Apache-2.0
"""The buffers of a module between clients: saved, put back, and combined by a policy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.clients.ema_and_banks import BufferPolicy, SideReport, SideTensors
from fl_lightning.clients.memory_banks import MemoryBanks, Vote, agreed
from fl_lightning.core.modules import _Buffer, _buffers_of
from fl_lightning.ops.dtypes import accumulation_device

_Kind = tuple[torch.dtype, torch.device]


@dataclass(frozen=True)
class BufferReport:
    """A client's buffers after training, as one vector per dtype, with the client's sample count.

    ``aside`` has untrained parameters and non-persistent buffers that the client changed, by name. ``votes`` says which
    buffers the client has written as memory banks.
    """

    size: int
    values: Mapping[_Kind, Tensor]
    aside: Mapping[str, Tensor] = field(default_factory=dict)
    votes: Mapping[str, Vote] = field(default_factory=dict)


class BufferBank:
    """The module's buffers (BatchNorm statistics and the like) outside local training.

    Buffers never enter update rows. Every client starts from the global ones. Those of torchmetrics are left alone:
    they belong to the metrics. :class:`SideTensors` has non-persistent buffers, and untrained parameters that may
    follow trained ones: the policy combines them where clients change them.

    Args:
        module: the module.
        policy: ``"mean"`` averages float buffers by sample counts, ``"largest"`` takes those of the client with the
            most samples, ``"global"`` leaves them as they are. Integer buffers are never averaged: under ``"mean"`` and
            ``"largest"`` they come from the client with the most samples. So do memory banks.
        trained: names of the trained parameters; ``None``: all that require gradients.
    """

    def __init__(self, module: nn.Module, policy: BufferPolicy, trained: Collection[str] | None = None) -> None:
        self._module = module
        self._policy: BufferPolicy = policy
        self._aside, self._banks = SideTensors(module, trained), MemoryBanks(module)
        self._banks.remember()
        self._take()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the buffers that are combined."""
        return tuple(buffer.name for buffer in self._buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of the buffers."""
        return sum(value.numel() * value.element_size() for value in self._global.values()) + self._aside.nbytes

    def remember(self) -> None:
        """Takes the module's present buffers as the global ones; called when a round begins."""
        self._aside.remember()
        self._banks.remember()
        self._take()

    def _take(self) -> None:
        self._buffers, _ = _buffers_of(self._module)
        self._global = _joined(self._buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the global buffers back into the module."""
        self._aside.restore()
        if not self._buffers:
            return
        for buffer, value in zip(self._buffers, self.values().values(), strict=True):
            # The tensor itself comes back too: a client may have put another one in its place.
            buffer.owner._buffers[buffer.key] = buffer.value
            buffer.value.copy_(value)

    def values(self) -> dict[str, Tensor]:
        """The global buffers that are combined, by name."""
        return self._named(self._global)

    def values_in(self, report: BufferReport) -> dict[str, Tensor]:
        """What a report holds, by name; nothing if the policy asks clients for nothing."""
        known = self._aside.values()
        aside = {name: value for name, value in report.aside.items() if value.shape == known[name].shape}
        return (self._named(report.values) if report.values else {}) | aside

    def report_with(
        self, size: int, values: Mapping[str, Tensor], votes: Mapping[str, Any] | None = None
    ) -> BufferReport:  # fmt: skip
        """The report of a client elsewhere.

        Args:
            size: its samples.
            values: what :meth:`values_in` its own has.
            votes: those of its own.

        Raises:
            ValueError: they are not those of the module.
        """
        if not values and self._policy == "global":
            return BufferReport(size, {})
        aside = self._check(values)
        parts: dict[_Kind, list[Tensor]] = {}
        for buffer in self._buffers:
            value = values[buffer.name].to(buffer.value)
            parts.setdefault(_kind(buffer.value), []).append(value.reshape(-1))
        flat = {kind: torch.cat(values) for kind, values in parts.items()}
        return BufferReport(size, flat, aside, self._banks.heard(votes or {}))

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        """Puts values of all buffers that are combined into the module, and of teachers and banks as far as they came.

        Raises:
            ValueError: they are not those of the module.
        """
        aside = self._check(values)
        for buffer in self._buffers:
            buffer.value.copy_(values[buffer.name])
        self._aside.put(aside)

    def _check(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the values that only clients that change them report."""
        known = self._aside.values()
        aside = {name: value for name, value in values.items() if name in known}
        shapes = {b.name: tuple(b.value.shape) for b in self._buffers}
        shapes |= {name: tuple(known[name].shape) for name in aside}
        found = {name: tuple(value.shape) for name, value in values.items()}
        if shapes != found:
            raise ValueError(f"buffers must be those of the module, {shapes}, found {found}")
        return {name: value.to(known[name]) for name, value in aside.items()}

    def _named(self, flat_values: Mapping[_Kind, Tensor]) -> dict[str, Tensor]:
        sizes: dict[_Kind, list[int]] = {}
        for buffer in self._buffers:
            sizes.setdefault(_kind(buffer.value), []).append(buffer.value.numel())
        parts = {kind: iter(torch.split(flat, sizes[kind])) for kind, flat in flat_values.items()}
        named = [b for b in self._buffers if _kind(b.value) in parts]
        return {b.name: next(parts[_kind(b.value)]).view(b.value.shape) for b in named}

    def global_values(self) -> dict[str, Tensor]:
        """The global values of all that local training may change beside parameters, by name.

        It is what a client elsewhere is sent, for :meth:`put`.
        """
        return self.values() | self._aside.values()

    def unsaved(self, in_visit: bool) -> dict[str, Tensor]:
        """See :meth:`SideTensors.unsaved`."""
        return self._aside.unsaved(in_visit)

    def load_unsaved(self, values: Mapping[str, Tensor]) -> None:
        """See :meth:`SideTensors.load_unsaved`."""
        self._aside.load_unsaved(values)

    def report(self, size: int, seen: int = 0) -> BufferReport:
        """The module's buffers as a client leaves them.

        Args:
            size: the client's samples.
            seen: samples that its visit has seen.

        Raises:
            ValueError: buffers appeared, vanished, or changed shape or dtype during local training.
        """
        aside = self._aside.report() if self._policy != "global" else {}
        if not self._buffers and next(self._module.buffers(), None) is None:
            return BufferReport(size, {}, aside)
        current, _ = _buffers_of(self._module)
        before, after = ({b.name: (b.value.shape, _kind(b.value)) for b in some} for some in (self._buffers, current))
        changed = sorted({name for name in before.keys() | after.keys() if before.get(name) != after.get(name)})
        if changed:
            raise ValueError(f"buffers must keep name, shape and dtype in local training, found changes in {changed}")
        looks = self._policy == "mean" and self._banks.possible
        votes = self._banks.votes(self.global_values(), seen) if looks else {}
        return BufferReport(size, _joined(current) if self._policy != "global" else {}, aside, votes)

    def finite(self, reports: Sequence[BufferReport]) -> Tensor:
        """``[m]`` whether all float buffers of a client are finite, or what they were before (a mask of -inf)."""
        fine = self._aside.finite(_aside(reports))
        for kind, before in self._global.items():
            if self._policy != "global" and before.is_floating_point():
                values = torch.stack([report.values[kind] for report in reports])
                fine &= (values.isfinite() | _same(values, before)).all(1).cpu()
        return fine

    @torch.no_grad()
    def commit(self, reports: Sequence[BufferReport]) -> None:
        """Makes new global buffers from the clients' by the policy, and puts them into the module.

        Raises:
            ValueError: something has changed untrained parameters after a client.
        """
        self._aside.check_between_clients()
        banks = agreed([report.votes for report in reports])
        self._aside.commit(_aside(reports), self._policy, banks)
        if reports and self._policy != "global":
            largest = max(reports, key=lambda report: report.size)
            for kind, before in self._global.items():
                values = torch.stack([report.values[kind] for report in reports])
                new = largest.values[kind]
                if self._policy == "mean" and before.is_floating_point():
                    wide = values.to(accumulation_device(before)).to(torch.float64)
                    weights = torch.tensor([float(report.size) for report in reports], dtype=torch.float64)
                    new = ((weights / weights.sum()).to(wide.device) @ wide).to(before.dtype).to(before.device)
                    of_one = self._named({kind: largest.values[kind]})
                    for name, value in self._named({kind: new}).items():
                        if name in banks:
                            value.copy_(of_one[name])
                # Constant buffers (class weights, position tables) must come back bit for bit, not as a rounded mean.
                self._global[kind] = torch.where(_same(values, before).all(0), before, new)
        self.restore()


def _aside(reports: Sequence[BufferReport]) -> list[SideReport]:
    return [SideReport(report.size, report.aside) for report in reports]


def _joined(buffers: Sequence[_Buffer]) -> dict[_Kind, Tensor]:
    parts: dict[_Kind, list[Tensor]] = {}
    for buffer in buffers:
        parts.setdefault(_kind(buffer.value), []).append(buffer.value.detach().reshape(-1))
    return {kind: torch.cat(values) for kind, values in parts.items()}


def _kind(tensor: Tensor) -> _Kind:
    return tensor.dtype, tensor.device


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Elementwise equality, with NaN equal to NaN."""
    return (one == other) | ((one != one) & (other != other))
