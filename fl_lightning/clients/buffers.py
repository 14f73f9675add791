# SPDX-License-Identifier: Apache-2.0
"""What a module keeps in tensors beside trained parameters, between clients: saved, put back, combined by a policy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.core.modules import buffers_of, followers_of
from fl_lightning.core.tensors import not_finite
from fl_lightning.lightning.module.values import equal_numbers, same_numbers
from fl_lightning.ops.rows import accumulation_device

BufferPolicy = Literal["mean", "global", "largest"]


@dataclass(frozen=True)
class BufferReport:
    """A client's buffers after training."""

    size: int  # samples
    values: Mapping[str, Tensor]  # all persistent buffers, and of the rest those that the client has changed


class _Found(NamedTuple):
    place: MutableMapping[str, Any]
    key: str
    value: Tensor


class BufferBank:
    """The module's buffers (BatchNorm statistics and the like) outside local training, and what goes with them.

    Buffers never enter update rows. Every client starts from the global ones. Those of torchmetrics are left alone:
    they belong to the metrics.

    Untrained parameters with the shape of a trained one are EMA teachers (BYOL, DINO, MoCo): they are in no optimizer
    and follow the student. They are combined like buffers, and so are non-persistent buffers, such as memory
    banks. In most modules these never change, so clients report those alone that they changed, and a client that left a
    tensor as it was counts with the global value. A persistent buffer may be resized in place, to one shape by all, as
    observers of quantization do. A non-persistent one that got another shape is a cache: it comes back as it was.

    The policy ``"mean"`` averages float buffers by sample counts, ``"largest"`` takes those of the client with the most
    samples, ``"global"`` leaves them as they are. Integer buffers are never averaged: under ``"mean"`` they come
    from the client with the most samples, too.
    """

    def __init__(self, module: nn.Module, policy: BufferPolicy, trained: Collection[str] | None = None) -> None:
        self._module, self._trained = module, trained
        self._policy: BufferPolicy = policy
        self._global: dict[str, Tensor] = {}
        self._moving = set[str]()
        self.remember()

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of the buffers."""
        return sum(value.nbytes for value in self._global.values())

    def remember(self) -> None:
        """Takes the module's present buffers as the global ones; called when a round begins."""
        before, self._global = self._global, {}
        persistent, caches = buffers_of(self._module)
        self.names = tuple(buffer.name for buffer in persistent)
        teachers = followers_of(self._module, self._trained)
        self._found = {b.name: _Found(b.place, b.key, b.value) for b in persistent}
        self._found |= {t.name: _Found(t.place, t.key, t.value) for t in teachers}
        self._found |= {b.name: _Found(b.place, b.key, b.value) for b in caches}
        for name, found in self._found.items():
            value, known = found.value.detach(), before.get(name)
            unchanged = name not in self.names and known is not None and same_numbers(value, known)
            # No copy of what stays as it is: most teachers and caches never change.
            self._global[name] = known if unchanged and known is not None else value.clone()
            if known is not None and not unchanged:
                self._moving.add(name)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the global buffers back into the module."""
        for name, (place, key, value) in self._found.items():
            # The tensor itself comes back too: a client may have put another one in its place.
            place[key] = value
            if _kind(value) == _kind(self._global[name]):
                value.data.copy_(self._global[name])
            else:
                value.data = self._global[name].clone()

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Puts earlier :meth:`global_values` into the module."""
        self._global |= values
        self.restore()

    def global_values(self) -> dict[str, Tensor]:
        """The global values of all that local training may change beside parameters, to be sent for :meth:`put`."""
        return dict(self._global)

    # ---- a client

    def report(self, size: int) -> BufferReport:
        """The module's buffers as a client leaves them, the same in name, shape and dtype as before."""
        has_any = bool(self.names) or next(self._module.buffers(), None) is not None
        persistent = buffers_of(self._module)[0] if has_any else []
        before = {name: _kind(self._found[name].value) for name in self.names}
        after = {buffer.name: _kind(buffer.value) for buffer in persistent}
        changed = sorted({name for name in before.keys() | after.keys() if before.get(name) != after.get(name)})
        if changed:
            raise ValueError(
                f"buffers must keep name, shape and dtype in local training, found changes in {changed}: register them "
                "in __init__ as large as they get, or with persistent=False, where each visit begins with the round's"
            )
        if self._policy == "global":
            return BufferReport(size, {})
        values = {buffer.name: buffer.value.detach().clone() for buffer in persistent}
        return BufferReport(size, values | self._changed())

    def _changed(self) -> dict[str, Tensor]:
        """Copies of teachers and non-persistent buffers that differ from the global values, by name."""
        others = {n: found.place.get(found.key) for n, found in self._found.items() if n not in self.names}
        return {
            name: value.detach().clone()
            for name, value in others.items()
            if value is not None and not same_numbers(value, self._global[name])
        }

    # ---- messages

    def values_in(self, report: BufferReport) -> dict[str, Tensor]:
        """What a report holds, by name; nothing if the policy asks clients for nothing."""
        return {name: value for name, value in report.values.items() if value.shape == self._global[name].shape}

    def report_with(self, size: int, values: Mapping[str, Tensor]) -> BufferReport:
        """The report of a client elsewhere; its buffers must be those of the module."""
        if not values and self._policy == "global":
            return BufferReport(size, {})
        return BufferReport(size, self._checked(values))

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        """Puts values of all persistent buffers into the module, and of others as far as they came."""
        for name, value in self._checked(values).items():
            self._found[name].value.data.copy_(value)

    def _checked(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        known = self._global
        shapes = {n: tuple(known[n].shape) for n in known if n in self.names or n in values}
        found = {name: tuple(value.shape) for name, value in values.items()}
        if shapes != found:
            raise ValueError(f"buffers must be those of the module, {shapes}, found {found}")
        return {name: value.to(known[name]) for name, value in values.items()}

    # ---- checkpoints

    def unsaved(self) -> dict[str, Tensor]:
        """Copies of the non-persistent buffers that have changed in this fit: no state dictionary has them."""
        found, before = {buffer.name: buffer.value for buffer in buffers_of(self._module)[1]}, self._global
        moved = {n for n, v in found.items() if n in self._moving or not same_numbers(v, before.get(n, v))}
        return {name: value.detach().clone() for name, value in found.items() if name in moved}

    @torch.no_grad()
    def load_unsaved(self, values: Mapping[str, Tensor]) -> None:
        """Takes what :meth:`unsaved` returned; what has another shape is a cache, and stays as it is."""
        for name, value in values.items():
            if name in self._found and self._found[name].value.shape == value.shape:
                self._found[name].value.data.copy_(value)
        self.remember()

    # ---- a round

    def finite(self, reports: Sequence[BufferReport]) -> Tensor:
        """``[m]`` whether all float buffers of a client are finite, or what they were before (a mask of -inf)."""
        named = {(place, name): value for place, r in enumerate(reports) for name, value in r.values.items()}
        fine = torch.ones(len(reports), dtype=torch.bool)
        for place, name in not_finite(named):
            fine[place] &= _is_allowed(named[place, name], self._global[name])
        return fine

    @torch.no_grad()
    def commit(self, reports: Sequence[BufferReport]) -> None:
        """Makes new global buffers from the clients' by the policy, and puts them into the module."""
        self._check_between_clients()
        largest = max(reports, key=lambda report: report.size, default=None)
        for name in sorted({name for report in reports for name in report.values}):
            before = self._global[name]
            values = [report.values.get(name, before) for report in reports]
            if largest is None or (name not in self.names and any(_kind(value) != _kind(before) for value in values)):
                continue
            if len(set(map(_kind, values))) > 1:
                shapes = [tuple(value.shape) for value in values]
                raise ValueError(
                    f"buffer {name!r} must have one shape at all clients of a round, found {shapes[:5]}: "
                    "register_buffer(..., persistent=False) makes it a cache, which comes back after every client"
                )
            new = largest.values.get(name, before)
            if self._policy == "mean" and before.is_floating_point():
                new = _mean(values, [report.size for report in reports])
            self._global[name] = new
            self._moving.add(name)
        self.restore()

    def _check_between_clients(self) -> None:
        """Makes sure that parameters that are not trained are as they were when the last client was put away."""
        changed = [name for name in self._changed() if isinstance(self._found[name].value, nn.Parameter)]
        if changed:
            names = ", ".join(map(repr, changed[:5]))
            raise ValueError(
                "parameters that do not require gradients, or are in no optimizer, must change in local training or "
                f"between rounds, found changes in {names} after a client: a callback's on_train_batch_end runs on the "
                "server, once per client; move what it does to the module's on_train_batch_end or on_before_zero_grad, "
                "which run in every local step"
            )


def _mean(values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The mean by samples, in double precision; bit for bit where all are equal."""
    like = values[0]
    weights = torch.tensor(sizes, dtype=torch.float64)
    weights /= weights.sum()
    total = torch.zeros(like.shape, dtype=torch.float64, device=accumulation_device(like))
    for weight, value in zip(weights.tolist(), values, strict=True):
        total += value.to(total) * weight
    # Constant buffers (class weights, position tables) must come back bit for bit, not as a rounded mean.
    same = torch.stack([value == values[0] for value in values]).all(0)
    return torch.where(same, values[0], total.to(like))


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _is_allowed(value: Tensor, before: Tensor) -> bool:
    """Whether what is not finite in a buffer was there before."""
    return value.shape == before.shape and bool((value.isfinite() | equal_numbers(value, before)).all())
