# SPDX-License-Identifier: Apache-2.0
"""A model outside the module, and the module standing in for it for a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.modules import named_model_buffers, outside_metrics, preserve_modes, submodules


@dataclass(frozen=True)
class Snapshot:
    """Parameters and buffers of one model."""

    params: Tensor  # [n] in flat order
    buffers: Tensor  # [bytes] the persistent ones one after the other, as uint8: exact for every dtype

    def to(self, device: torch.device | str) -> Snapshot:
        """The same model on another device."""
        return Snapshot(self.params.to(device), self.buffers.to(device))


@dataclass(frozen=True)
class Layers:
    """Some layers of a module."""

    parameters: frozenset[str]
    buffers: frozenset[str]

    def of(self, tensors: Sequence[Tensor], layout: ParamLayout) -> list[Tensor]:
        """Those of a module's parameters, given in flat order, that are of these layers."""
        return [tensor for name, tensor in zip(layout.names, tensors, strict=True) if name in self.parameters]

    def buffers_of(self, module: nn.Module) -> list[Tensor]:
        """Those of the module's persistent buffers that are of these layers."""
        return [value for name, value in named_model_buffers(module) if name in self.buffers]


@dataclass(frozen=True)
class ModelPart:
    """Some layers of one model; what it lacks comes from the module that it is put into."""

    values: Snapshot  # parameters of these layers alone, one after the other in flat order, and their buffers
    find: Callable[[nn.Module, ParamLayout], Layers]  # in a module with these trained parameters

    def completed(self, module: nn.Module, parameters: Sequence[nn.Parameter], layout: ParamLayout) -> Snapshot:
        """The module's present model, with these layers in the places of its own."""
        values, layers = self.values.to(parameters[0].device), self.find(module, layout)
        params = layout.flatten(parameters)
        put_flat(values.params, layers.of(layout.views(params), layout))
        with preserve_buffers(module):
            unpack(values.buffers, layers.buffers_of(module))
            return Snapshot(params, packed_buffers(module, params.device))


def put_flat(flat: Tensor, into: Sequence[Tensor]) -> None:
    """Writes a vector into tensors, one after the other."""
    sizes = [tensor.numel() for tensor in into]
    if len(flat) != sum(sizes):
        raise ValueError(f"a client's layers must have {sum(sizes)} parameters, found {len(flat)}")
    for tensor, part in zip(into, torch.split(flat, sizes), strict=True):
        tensor.copy_(part.view(tensor.shape))


def packed_buffers(module: nn.Module, device: torch.device) -> Tensor:
    """The module's persistent buffers (those of its metrics left out) as bytes, a copy on ``device``."""
    return packed([value for _, value in named_model_buffers(module)], device)


def packed(buffers: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tensors of any dtypes as bytes, a copy on ``device``."""
    values = [value.detach().reshape(-1).contiguous() for value in buffers]
    parts = [value.view(torch.uint8).to(device) for value in values if value.numel() > 0]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


@contextmanager
def standing_in(
    module: nn.Module,
    parameters: Sequence[nn.Parameter],
    layout: ParamLayout,
    model: Snapshot | None = None,
    evaluate: bool = False,
) -> Iterator[None]:
    """Lets the module be another model, or a copy of itself whose buffers may change.

    Parameters and buffers come back as the same tensors, untouched, so a graph that was built before and is used
    afterwards stays valid. Whatever the body does to the buffers (BatchNorm counts batches) is lost with it.
    ``parameters`` are the module's in flat order.
    """
    data = [parameter.data for parameter in parameters]
    with preserve_buffers(module), preserve_modes(submodules(module)):
        try:
            if model is not None:
                unpack(model.buffers, [value for _, value in named_model_buffers(module)])
                for parameter, view in zip(parameters, layout.views(model.params), strict=True):
                    parameter.data = view
            if evaluate:
                module.eval()
            yield
        finally:
            for parameter, tensor in zip(parameters, data, strict=True):
                parameter.data = tensor


@contextmanager
def preserve_buffers(module: nn.Module) -> Iterator[None]:
    """Puts copies in the places of the module's buffers (those of its metrics left out), and the tensors back."""
    owners = [owner for _, owner in outside_metrics(submodules(module))]
    # Every place that holds a buffer, aliases included.
    slots = [(owner, key, value) for owner in owners for key, value in owner._buffers.items() if value is not None]
    copies = {id(value): value.detach().clone() for _, _, value in slots}
    for owner, key, value in slots:
        owner._buffers[key] = copies[id(value)]
    try:
        yield
    finally:
        for owner, key, value in slots:
            owner._buffers[key] = value


def unpack(packed: Tensor, into: Sequence[Tensor]) -> None:
    """Writes what :func:`packed` returned into the tensors."""
    sizes = [value.numel() * value.element_size() for value in into]
    if packed.numel() != sum(sizes):
        raise ValueError(f"a client's stored model must have {sum(sizes)} B of buffers, found {packed.numel()} B")
    for value, part in zip(into, torch.split(packed, sizes), strict=True):
        # A copy, because a part may begin where its dtype must not.
        value.copy_(part.clone().view(value.dtype).view(value.shape))
