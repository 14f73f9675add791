# SPDX-License-Identifier: Apache-2.0
"""A module whose parameters are views of flat vectors, and whose buffers can be saved and put back.

Between clients the parameters are bound to the global vector ``theta``; during local training they are bound to the
client's row. Binding assigns views and copies nothing, so the global weights are never at risk: whatever happens inside
a client, rebinding brings them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from fl_lightning.updates import LayerSpec, ParamLayout

BufferPolicy = Literal["mean", "global", "largest"]


class Binding:
    """Binds a module's trainable parameters to flat vectors.

    Args:
        module: the module, already on its device and in its final precision.
        layers: how parameters group into layers, see :meth:`ParamLayout.from_module`.

    Attributes:
        theta: ``[n]`` the global parameters; the module is bound to it after construction.

    Raises:
        ValueError: the trainable parameters differ in dtype or device.
    """

    def __init__(self, module: nn.Module, layers: LayerSpec) -> None:
        self.module = module
        self.layout = ParamLayout.from_module(module, layers)
        self.parameters = self.layout.parameters(module)
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) > 1:
            found = sorted(f"{dtype} on {device}" for dtype, device in kinds)
            raise ValueError(f"trainable parameters must share one dtype and device, found {', '.join(found)}")
        self.theta = self.layout.flatten(self.parameters)
        self._global = self.layout.views(self.theta)
        self.bind_global()

    def check(self) -> None:
        """Raises ValueError if parameters were frozen, thawed, added or replaced since the layout was made."""
        current = self.layout.parameters(self.module)
        replaced = [n for n, p, q in zip(self.layout.names, current, self.parameters, strict=True) if p is not q]
        if replaced:
            raise ValueError(f"trainable parameters must stay the same objects during a fit, replaced: {replaced}")

    def bind(self, views: Sequence[Tensor]) -> None:
        """Points the parameters at views with their shapes, and forgets gradients."""
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
            parameter.grad = None

    def bind_flat(self, flat: Tensor) -> None:
        """Points the parameters at a contiguous ``[n]`` vector."""
        self.bind(self.layout.views(flat))

    def bind_global(self) -> None:
        """Points the parameters back at the global vector."""
        self.bind(self._global)

    def release(self) -> None:
        """Gives every parameter a storage of its own again, so that the module no longer depends on ``theta``."""
        for parameter, view in zip(self.parameters, self._global, strict=True):
            parameter.data = view.clone()


@dataclass(frozen=True)
class BufferReport:
    """A client's buffers after training, with the client's sample count."""

    size: int
    values: tuple[Tensor, ...]


class BufferBank:
    """The module's buffers (BatchNorm statistics and the like) outside local training.

    Buffers never enter update rows. Buffers of torchmetrics are left alone: they belong to the metrics.

    Args:
        module: the module.
        policy: ``"mean"`` averages float buffers by sample counts, ``"largest"`` takes those of the client with the
            most samples, ``"global"`` leaves them as they are. Integer buffers are never averaged: under ``"mean"`` and
            ``"largest"`` they come from the client with the most samples.
    """

    def __init__(self, module: nn.Module, policy: BufferPolicy) -> None:
        self._module = module
        self._policy = policy
        metrics = {id(b) for m in module.modules() if isinstance(m, Metric) for b in m.buffers()}
        self.names = tuple(name for name, buffer in module.named_buffers() if id(buffer) not in metrics)
        self._global = self._read()

    def _current(self) -> list[Tensor]:
        buffers = dict(self._module.named_buffers())
        return [buffers[name] for name in self.names]

    def _read(self) -> tuple[Tensor, ...]:
        return tuple(buffer.detach().clone() for buffer in self._current()) if self.names else ()

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of the buffers."""
        return sum(value.numel() * value.element_size() for value in self._global)

    def remember(self) -> None:
        """Takes the module's present buffers as the global ones (after a checkpoint was loaded, say)."""
        self._global = self._read()

    def restore(self) -> None:
        """Puts the global buffers back into the module."""
        if self.names:
            for buffer, value in zip(self._current(), self._global, strict=True):
                buffer.copy_(value)

    def report(self, size: int) -> BufferReport:
        """The module's buffers as a client leaves them."""
        return BufferReport(size, self._read() if self._policy != "global" else ())

    def commit(self, reports: Sequence[BufferReport]) -> None:
        """Makes new global buffers from the clients' by the policy, and puts them into the module."""
        if self.names and reports and self._policy != "global":
            largest = max(reports, key=lambda report: report.size)
            self._global = tuple(
                self._merge([r.values[i] for r in reports], [r.size for r in reports], largest.values[i], value)
                for i, value in enumerate(self._global)
            )
        self.restore()

    def _merge(self, values: list[Tensor], sizes: list[int], largest: Tensor, before: Tensor) -> Tensor:
        # Constant buffers (class weights, position tables) must come back bit for bit, not as a rounded mean.
        if all(torch.equal(value, before) for value in values):
            return before
        if self._policy == "largest" or not before.is_floating_point():
            return largest
        weights = torch.tensor(sizes, dtype=torch.float64, device=before.device) / sum(sizes)
        stacked = torch.stack(values).to(torch.float64)
        return torch.tensordot(weights, stacked, dims=1).to(before.dtype)
