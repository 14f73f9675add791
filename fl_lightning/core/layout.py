# SPDX-License-Identifier: Apache-2.0
"""How trained parameters lie in one flat vector, and how they group into layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from fl_lightning.arguments import FILLED, Bounds, checked, trusted
from fl_lightning.core.modules import trained_parameters

LayerSpec = Literal["module", "tensor", "model"] | Sequence[Sequence[str]]


@checked(shapes=Bounds(0), layer_starts=Bounds(0))
@dataclass(frozen=True)
class ParamLayout:
    """Names, shapes and layers of the trained parameters inside a flat vector of ``n`` numbers.

    Attributes:
        names: qualified parameter names in flat order.
        shapes: their shapes.
        layer_names: one name per layer.
        layer_starts: ``L + 1`` offsets; layer ``l`` is the slice ``layer_starts[l]:layer_starts[l + 1]``.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layer_names: tuple[str, ...]
    layer_starts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes):
            raise ValueError(f"names and shapes must have equal lengths, found {self.names} and {self.shapes}")
        if len(self.layer_starts) != len(self.layer_names) + 1 or self.layer_starts[0] != 0:
            raise ValueError(
                "layer_starts must begin at 0 and be one longer than layer_names, found "
                f"{self.layer_starts} for layer_names {self.layer_names}"
            )
        if len(set(self.layer_names)) != len(self.layer_names):
            raise ValueError(f"layer_names must be distinct, found {self.layer_names}")
        if any(a > b for a, b in zip(self.layer_starts, self.layer_starts[1:], strict=False)):
            raise ValueError(f"layer_starts must not decrease, found {self.layer_starts}")
        if self.layer_starts[-1] != self.numel:
            raise ValueError(f"layer_starts must end at {self.numel}, found {self.layer_starts[-1]}")

    @classmethod
    @checked(layers=FILLED, trained=FILLED)
    def from_module(
        cls, module: nn.Module, layers: LayerSpec = "module", trained: Sequence[str] | None = None
    ) -> ParamLayout:
        """Lays out the trained parameters of ``module``.

        Args:
            module: any module; shared parameters count once, frozen ones are left out.
            layers: ``"module"`` joins the parameters that one submodule owns (weight and bias), ``"tensor"`` makes a
                layer of each, ``"model"`` one of all. A list of lists of parameter names gives the layers explicitly;
                the flat order follows it, and every trained parameter must occur exactly once.
            trained: names of the trained parameters; ``None``: all that require gradients. In a fit they are those that
                an optimizer of ``configure_optimizers`` holds.

        Raises:
            ValueError: nothing is trained, a name is none of a parameter that requires gradients, a parameter or
                buffer is uninitialised, ``layers`` is none of the above, or explicit layers do not cover the trained
                parameters exactly once.
        """
        trainable = _requiring_gradients(module, trained, "trained")
        if not trainable:
            raise ValueError("module must have at least one parameter that requires gradients, found none")
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            if nn.parameter.is_lazy(tensor):  # trained or not: every visit would give it other values
                raise ValueError(f"{name!r} is uninitialised: run one batch through the lazy module first")
        groups = _group(list(trainable), layers)
        names = [name for _, members in groups for name in members]
        starts = [0]
        for _, members in groups:
            starts.append(starts[-1] + sum(trainable[name].numel() for name in members))
        shapes = tuple(tuple(trainable[name].shape) for name in names)
        return trusted(cls)(tuple(names), shapes, tuple(name for name, _ in groups), tuple(starts))

    @classmethod
    @checked(sizes=Bounds(0, filled=True))
    def from_sizes(cls, sizes: Sequence[int]) -> ParamLayout:
        """A layout of one flat tensor per layer, for rows that do not come from a module."""
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size)
        names = tuple(f"layer{index}" for index in range(len(sizes)))
        return cls(names, tuple((size,) for size in sizes), names, tuple(starts))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each parameter tensor."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where the parameter tensors begin, and behind them ``n``."""
        return (0, *accumulate(self.sizes))

    @cached_property
    def numel(self) -> int:
        """Number of trained numbers, ``n``."""
        return sum(self.sizes)

    @property
    def num_layers(self) -> int:
        """Number of layers, ``L``."""
        return len(self.layer_names)

    @cached_property
    def offsets(self) -> Tensor:
        """``[L + 1]`` int64 layer offsets on the CPU, as the ops take them."""
        return torch.tensor(self.layer_starts, dtype=torch.int64)

    @cached_property
    def layer_shares(self) -> Tensor:
        """``[L]`` float64 shares of the columns that the layers hold, on the CPU."""
        return self.offsets.diff().to(torch.float64) / self.numel

    def merged(self) -> ParamLayout:
        """The same flat order with a single layer."""
        return ParamLayout(self.names, self.shapes, ("model",), (0, self.numel))

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """The module's parameters in flat order.

        Raises:
            ValueError: one is gone or no longer requires gradients.
        """
        current = _requiring_gradients(module, self.names, "the layout")
        return [current[name] for name in self.names]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of a contiguous ``[n]`` vector with the parameters' shapes, in flat order.

        Raises:
            ValueError: ``flat`` is not a contiguous vector of ``n`` numbers.
        """
        if flat.shape != (self.numel,) or not flat.is_contiguous():
            found = f"shape {tuple(flat.shape)}, strides {flat.stride()}"
            raise ValueError(f"flat must be a contiguous vector of {self.numel} numbers, found {found}")
        return [part.view(shape) for part, shape in zip(torch.split(flat, list(self.sizes)), self.shapes, strict=True)]

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenates tensors given in flat order into a new ``[n]`` vector.

        Raises:
            ValueError: number or shapes of the tensors differ from the layout's.
        """
        found = tuple(tuple(t.shape) for t in tensors)
        if found != self.shapes:
            raise ValueError(f"tensors must have the layout's shapes {self.shapes}, found {found}")
        return torch.cat([t.detach().reshape(-1) for t in tensors])


def _requiring_gradients(module: nn.Module, trained: Sequence[str] | None, names: str) -> dict[str, nn.Parameter]:
    found = trained_parameters(module, trained)
    lacking = [name for name in trained or () if name not in found or not found[name].requires_grad]
    if lacking:
        kind = type(module).__name__
        raise ValueError(f"{names} must name parameters of {kind} that require gradients, found {lacking}")
    return found


def _group(names: list[str], layers: LayerSpec) -> list[tuple[str, list[str]]]:
    if isinstance(layers, str):
        if layers == "tensor":
            return [(name, [name]) for name in names]
        if layers == "model":
            return [("model", names)]
        owners: dict[str, list[str]] = {}
        for name in names:
            owners.setdefault(name.rpartition(".")[0], []).append(name)
        # The root has no name of its own, and "model" may be the name of a submodule.
        root = "root" if "model" in owners else "model"
        return [(owner or root, members) for owner, members in owners.items()]
    explicit = [(f"block{index}" if len(group) != 1 else group[0], list(group)) for index, group in enumerate(layers)]
    listed = [name for _, group in explicit for name in group]
    if sorted(listed) != sorted(names):
        missing, extra = sorted(set(names) - set(listed)), sorted(set(listed) - set(names))
        twice = sorted({name for name in listed if listed.count(name) > 1})
        raise ValueError(
            f"layers must name every trained parameter exactly once, found {explicit}: "
            f"missing {missing}, unknown {extra}, twice {twice}"
        )
    return explicit


def layout_fingerprint(layout: ParamLayout) -> dict[str, list[str]]:
    """Order, names and shapes of the parameters, and the layers with where they begin, as a checkpoint keeps them."""
    bounds = zip(layout.layer_names, layout.layer_starts[:-1], layout.layer_starts[1:], strict=True)
    return {
        "parameters": [f"{n} {list(shape)}" for n, shape in zip(layout.names, layout.shapes, strict=True)],
        "layers": [f"{name} [{start}:{stop}]" for name, start, stop in bounds],
    }


def layout_difference(old: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> str:
    """Where two fingerprints first differ, in words; empty if they agree."""
    for kind, singular in (("parameters", "parameter"), ("layers", "layer")):
        for place, (a, b) in enumerate(zip(old[kind], new[kind], strict=False)):
            if a != b:
                return f"{singular} {place}: {a} became {b}"
        if len(old[kind]) != len(new[kind]):
            return f"{len(old[kind])} {kind} became {len(new[kind])}"
    return ""


def names_in(fingerprint: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Names of the parameters that :func:`layout_fingerprint` lists."""
    return tuple(entry.rpartition(" [")[0] for entry in fingerprint["parameters"])
