# SPDX-License-Identifier: Apache-2.0
"""Submodules found quickly, for code that runs at every batch.

``nn.Module.modules`` keeps a set of modules, and the hash of a torchmetrics metric is one of all its states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torchmetrics import Metric

from fl_lightning.core.tensors import digest

BatchNorm = nn.modules.batchnorm._BatchNorm


def submodules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """What ``module.named_modules()`` yields, each module once, in the same order."""
    found: list[tuple[str, nn.Module]] = []
    _visit(module, "", set(), found)
    return found


def outside_metrics(parts: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Those that are no metric and no part of one, also if the module holds them elsewhere as well."""
    metrics = [part for _, part in parts if isinstance(part, Metric)]
    skipped = {id(part) for metric in metrics for _, part in submodules(metric)}
    return [(name, part) for name, part in parts if id(part) not in skipped]


def named_metrics(module: nn.Module) -> list[tuple[str, Metric]]:
    """The metrics of a module by name, without those that are part of another one: a wrapper sees to its own."""
    metrics = [(name, part) for name, part in submodules(module) if isinstance(part, Metric)]
    inner = {id(part) for _, metric in metrics for _, part in submodules(metric) if part is not metric}
    return [(name, metric) for name, metric in metrics if id(metric) not in inner]


def state_on_cpu(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the module's state dictionary on the CPU."""
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


@contextmanager
def preserve_modes(parts: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Gives every module its training or evaluation mode back in the end."""
    modes = [(part, part.training) for _, part in parts]
    try:
        yield
    finally:
        for part, mode in modes:
            if part.training != mode:  # setting an attribute of a module costs more than reading one
                part.training = mode


@contextmanager
def shadowed(owner: object, **values: Any) -> Iterator[None]:
    """Puts other values in front of attributes and methods of an object, and takes them away in the end."""
    attributes = vars(owner)  # nn.Module's own way of setting one would register submodules and tensors
    hidden = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(hidden)


def _visit(module: nn.Module, name: str, seen: set[int], found: list[tuple[str, nn.Module]]) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    found.append((name, module))
    for key, child in module._modules.items():
        if child is not None:
            _visit(child, f"{name}.{key}" if name else key, seen, found)


class _Buffer(NamedTuple):
    place: dict[str, Any]  # of its owner
    key: str
    name: str
    value: Tensor


def named_model_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The persistent buffers of a module without those of its metrics, each once, in a fixed order."""
    return [(buffer.name, buffer.value) for buffer in buffers_of(module)[0]]


def buffers_of(module: nn.Module) -> tuple[list[_Buffer], list[_Buffer]]:
    """A module's buffers without those of its metrics: the persistent ones, and the others."""
    found: tuple[list[_Buffer], list[_Buffer]] = ([], [])
    seen: set[int] = set()
    for prefix, owner in outside_metrics(submodules(module)):
        for key, value in owner._buffers.items():
            if value is not None and id(value) not in seen:
                seen.add(id(value))
                name = f"{prefix}.{key}" if prefix else key
                found[key in owner._non_persistent_buffers_set].append(_Buffer(owner._buffers, key, name, value))
    return found


def trained_parameters(module: nn.Module, trained: Collection[str] | None) -> dict[str, nn.Parameter]:
    """The parameters of a module that are trained, by name; those that require gradients if nobody names them."""
    names = None if trained is None else frozenset(trained)
    return {n: p for n, p in module.named_parameters() if (p.requires_grad if names is None else n in names)}


def followers_of(module: nn.Module, trained: Collection[str] | None = None) -> list[_Buffer]:
    """Untrained parameters with the shape of a trained one, as EMA teachers have; each once, in a fixed order."""
    own = trained_parameters(module, trained).values()
    kinds = {(parameter.shape, parameter.dtype) for parameter in own}
    found: list[_Buffer] = []
    seen = {id(parameter) for parameter in own}
    for prefix, owner in submodules(module):
        for key, value in owner._parameters.items():
            if value is None or id(value) in seen:
                continue
            if (value.shape, value.dtype) in kinds:
                seen.add(id(value))
                found.append(_Buffer(owner._parameters, key, f"{prefix}.{key}" if prefix else key, value))
    return found


def still_parameters(module: nn.Module, trained: Collection[str] | None) -> dict[str, nn.Parameter]:
    """The parameters that stay as they are, by name: neither trained ones nor :func:`followers_of` them."""
    moving = {id(parameter) for parameter in trained_parameters(module, trained).values()}
    moving |= {id(follower.value) for follower in followers_of(module, trained)}
    return {name: parameter for name, parameter in module.named_parameters() if id(parameter) not in moving}


def frozen_digest(module: nn.Module, trained: Collection[str]) -> str:
    """One digest of :func:`still_parameters`."""
    return digest(*(part for named in still_parameters(module, trained).items() for part in named))
