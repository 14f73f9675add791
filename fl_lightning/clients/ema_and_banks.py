# SPDX-License-Identifier: Apache-2.0
"""Tensors that local training seldom changes: parameters that are not trained, and non-persistent buffers."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, MutableMapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.core.modules import followers_of, non_persistent_buffers_of
from fl_lightning.ops.dtypes import accumulation_device

BufferPolicy = Literal["mean", "global", "largest"]


class SideReport(NamedTuple):
    """What one client changed, by name, and its number of samples."""

    size: int
    values: Mapping[str, Tensor]


class SideTensors:
    """Untrained parameters with the shape of a trained one, and non-persistent buffers, outside local training.

    An EMA teacher (BYOL, DINO, MoCo) is in no optimizer and follows the student, and a memory bank may be a
    non-persistent buffer. They are combined like other buffers. In most modules they never change, so clients report
    those alone that they changed, and a client that left a tensor as it was counts with the global value. A buffer that
    got another shape is a cache: it comes back as it was.

    Args:
        module: the module.
        trained: names of the trained parameters; ``None``: all that require gradients.
    """

    def __init__(self, module: nn.Module, trained: Collection[str] | None = None) -> None:
        self._module, self._trained = module, trained
        self._global: dict[str, Tensor] = {}
        self._moving: set[str] = set()
        self.remember()

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return sum(value.numel() * value.element_size() for value in self._global.values())

    def remember(self) -> None:
        """Takes the module's present tensors as the global ones; called when a round begins."""
        before = self._global
        self._found = {tensor.name: tensor for tensor in self._all()}
        self._global = {}
        for name, found in self._found.items():
            value, known = found.value.detach(), before.get(name)
            if known is not None and _equal(value, known):
                self._global[name] = known
                continue
            self._global[name] = value.clone()
            if known is not None:
                self._moving.add(name)

    def _all(self) -> list[_Tensor]:
        followers, caches = followers_of(self._module, self._trained), non_persistent_buffers_of(self._module)
        found = [_Tensor(owner._parameters, key, name, value) for owner, key, name, value in followers]
        return [*found, *(_Tensor(owner._buffers, key, name, value) for owner, key, name, value in caches)]

    def unsaved(self, in_visit: bool) -> dict[str, Tensor]:
        """Copies of the non-persistent buffers that have changed in this fit: no state dictionary has them.

        Args:
            in_visit: a client is in training; its changes are not looked at.
        """
        found = {}
        for _, _, name, value in non_persistent_buffers_of(self._module):
            before = self._global.get(name, value)
            if name in self._moving or (not in_visit and not _equal(value, before)):
                found[name] = (before if in_visit else value).detach().clone()
        return found

    def load_unsaved(self, values: Mapping[str, Tensor]) -> None:
        """Takes what :meth:`unsaved` returned; what has another shape is a cache, and stays as it is."""
        self.put(
            {n: value for n, value in values.items() if n in self._found and self._found[n].value.shape == value.shape}
        )
        self.remember()

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        """Puts some values into the module, by name; :meth:`remember` takes them as global ones."""
        for name, value in values.items():
            self._found[name].value.data.copy_(value)

    def values(self) -> dict[str, Tensor]:
        """The global values by name."""
        return dict(self._global)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the global values back into the module."""
        for name, found in self._found.items():
            # The tensor itself comes back too: a client may have put another one in its place.
            found.place[found.key] = found.value
            value = self._global[name]
            if found.value.shape == value.shape:
                found.value.data.copy_(value)
            else:
                found.value.data = value.clone()

    def report(self) -> dict[str, Tensor]:
        """Copies of what differs from the global values, by name."""
        current = {name: found.place.get(found.key) for name, found in self._found.items()}
        return {
            name: value.detach().clone()
            for name, value in current.items()
            if value is not None and not _equal(value.detach(), self._global[name])
        }

    def check_between_clients(self) -> None:
        """Makes sure that parameters that are not trained are as they were when the last client was put away.

        Raises:
            ValueError: they changed since, which the next client would not see; names them.
        """
        changed = [name for name in self.report() if isinstance(self._found[name].value, nn.Parameter)]
        if changed:
            names = ", ".join(map(repr, changed[:5]))
            raise ValueError(
                "parameters that do not require gradients, or are in no optimizer, must change in local training or "
                f"between rounds, found changes in {names} after a client: a callback's on_train_batch_end runs on the "
                "server, once per client; move what it does to the module's on_train_batch_end or on_before_zero_grad, "
                "which run in every local step"
            )

    def finite(self, reports: Sequence[SideReport]) -> Tensor:
        """``[m]`` whether all that a client reports is finite."""
        fine = [all(bool(value.isfinite().all()) for value in report.values.values()) for report in reports]
        return torch.tensor(fine, dtype=torch.bool)

    @torch.no_grad()
    def commit(
        self, reports: Sequence[SideReport], policy: BufferPolicy, banks: Container[str] = frozenset()
    ) -> None:  # fmt: skip
        """Makes new global values from the clients' by the policy; memory banks come from one client."""
        if policy == "global" or not reports:
            return
        largest = max(reports, key=lambda report: report.size)
        for name in sorted({name for report in reports for name in report.values}):
            before = self._global[name]
            values = [report.values.get(name, before) for report in reports]
            if any(value.shape != before.shape or value.dtype != before.dtype for value in values):
                continue
            new = largest.values.get(name, before)
            if policy == "mean" and before.is_floating_point() and name not in banks:
                new = _mean(values, [report.size for report in reports], before)
            self._global[name] = new
            self._moving.add(name)


class _Tensor(NamedTuple):
    place: MutableMapping[str, Any]
    key: str
    name: str
    value: Tensor


def _mean(values: Sequence[Tensor], sizes: Sequence[int], like: Tensor) -> Tensor:
    """The mean by samples, in double precision; bit for bit where all are equal."""
    weights = torch.tensor(sizes, dtype=torch.float64)
    weights /= weights.sum()
    total = torch.zeros(like.shape, dtype=torch.float64, device=accumulation_device(like))
    for weight, value in zip(weights.tolist(), values, strict=True):
        total += value.to(total) * weight
    same = torch.stack([value == values[0] for value in values]).all(0)
    return torch.where(same, values[0], total.to(like))


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
