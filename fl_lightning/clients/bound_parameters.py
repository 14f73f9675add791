# SPDX-License-Identifier: Apache-2.0
"""A module whose trained parameters are views of flat vectors.

Between clients they are bound to the global vector ``theta``, in local training to memory of :class:`UpdateRows`.
Binding assigns views and copies nothing, so a client cannot damage the global weights: binding them again brings them
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.core.errors import ModuleError
from fl_lightning.core.layout import LayerSpec, ParamLayout
from fl_lightning.core.modules import still_parameters
from fl_lightning.core.tensors import aligned, memory_of, not_finite, span_of
from fl_lightning.lightning.module.snapshot import ModuleSnapshot
from fl_lightning.lightning.optimizers import trained_names
from fl_lightning.ops.rows import accumulation_device


class BoundParameters:
    """Binds a module's trained parameters to flat vectors, once it is on its device and in its final precision."""

    def __init__(self, module: nn.Module, layers: LayerSpec, optimizers: Sequence[Optimizer] = ()) -> None:
        self.module = module
        self.layout = ParamLayout.from_module(module, layers, trained_names(module, optimizers))
        self.parameters = self.layout.parameters(module)
        self._check_memory(ModuleSnapshot(module).tensors)
        kinds: dict[str, list[str]] = {}
        for name, p in zip(self.layout.names, self.parameters, strict=True):
            kinds.setdefault(f"{p.dtype} on {p.device}", []).append(name)
        if len(kinds) > 1:
            found = "; ".join(f"{kind}: {_some(names)}" for kind, names in sorted(kinds.items()))
            raise ValueError(f"trained parameters must share one dtype and device, found {found}")
        if not self.parameters[0].is_floating_point():
            raise ValueError(f"trained parameters must be floating point, found {', '.join(kinds)}")
        # Tensors without storage that remember the memory format (channels_last).
        self._formats = [torch.empty_like(p.data, device="meta") for p in self.parameters]
        self.theta = self.layout.flatten(self.parameters)  # [n] the global parameters
        self.global_views = self.layout.views(self.theta)  # its parts with the parameters' shapes
        self._marks: dict[str, Tensor] = {}
        self._flags: list[tuple[nn.Parameter, bool]] = []
        self._idle = self._not_trained()
        self._at_global = False
        self.bind_global()

    def _check_memory(self, held: Iterable[tuple[str, Tensor]]) -> None:
        """Refuses what lies in the memory of a trained parameter, which is about to be bound to other memory.

        ``held`` are tensors that the module holds in attributes, with their names.
        """
        trained = dict(zip(self.layout.names, self.parameters, strict=True))
        beside = [*self.module.named_parameters(), *self.module.named_buffers(), *held]
        before: dict[int | None, list[tuple[str, int, int]]] = {None: []}
        for name, tensor in (*trained.items(), *((n, t) for n, t in beside if trained.get(n) is not t)):
            memory = memory_of(tensor)
            start, end = (0, 0) if memory is None else span_of(tensor)
            for other, first, last in before.get(memory, ()):
                if start < last and first < end and other != f"{name}_orig" and not name.startswith("_hparams"):
                    raise ValueError(
                        f"nothing may lie in the memory of the trained parameter {other!r}, which a fit binds to other "
                        f"memory, found {name!r}: tie parameters as one object (b.weight = a.weight), make views in "
                        "forward, and copies with .detach().clone()"
                    )
            if trained.get(name) is tensor and memory is not None:
                before.setdefault(memory, []).append((name, start, end))

    def renewed(self, layers: LayerSpec, optimizers: Sequence[Optimizer]) -> BoundParameters:
        """This binding, or another one if parameters were frozen, thawed or added since, as in ``on_fit_start``."""
        trained = trained_names(self.module, optimizers)
        named = dict(self.module.named_parameters())
        if {id(named[name]) for name in trained} == {id(p) for p in self.parameters}:
            return self
        self.reclaim(self.global_views)
        self.release()
        return BoundParameters(self.module, layers, optimizers)

    def check(self, optimizers: Sequence[Optimizer], held: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """Makes sure that a round can begin: the trained parameters are those of the layout, and the same objects.

        ``held`` gives tensors in the module's attributes, with their names, which must be in other memory.
        """
        named = dict(self.module.named_parameters())
        before = zip(self.layout.names, self.parameters, strict=True)
        replaced = [name for name, parameter in before if name in named and named[name] is not parameter]
        if replaced:
            raise ValueError(f"trained parameters must stay the same objects during a fit, replaced: {replaced}")
        changed = sorted(set(trained_names(self.module, optimizers)) ^ set(self.layout.names))
        if changed:
            raise ValueError(
                f"the trained parameters must not change during a fit, found changes in {changed}: freeze, thaw, add "
                "or remove them before it, in the module's __init__, configure_model, setup or on_fit_start, and let "
                "configure_optimizers give them to an optimizer"
            )
        self.reclaim(self.global_views)
        self._idle = self._not_trained()
        self.bind_global()
        if not self._flags:  # hooks may have taken views since the fit began
            self._check_memory(held())
        self._marks = self._frozen_marks()
        self._flags = [(parameter, parameter.requires_grad) for parameter in named.values()]

    def _not_trained(self) -> list[nn.Parameter]:
        """The parameters that require gradients and are in no optimizer."""
        own = {id(parameter) for parameter in self.parameters}
        return [p for p in self.module.parameters() if p.requires_grad and id(p) not in own]

    @property
    def not_trained(self) -> str:
        """How many parameters require gradients and are in no optimizer, in words; empty without any."""
        count, numbers = len(self._idle), sum(p.numel() for p in self._idle)
        return f"{count} parameter{'s' * (count > 1)} with {numbers:,} numbers" if count else ""

    def check_finite(self) -> None:
        """Raises ValueError if a fit would begin with weights that are not finite."""
        broken = not_finite(dict(zip(self.layout.names, self.global_views, strict=True)))
        if broken:
            raise ValueError(
                f"the parameters of {type(self.module).__name__} must be finite when a fit begins, found NaN or "
                f"infinity in {', '.join(broken)}: no client could train with them"
            )

    def check_frozen(self) -> None:
        """Makes sure that local training left parameters alone that are not trained, and names those it did not.

        Those with the shape of a trained one may change: :class:`BufferBank` brings them back after every client.
        """
        before, after = self._marks, self._frozen_marks()
        moved = [name for name, mark in before.items() if not torch.allclose(mark, after.get(name, mark), 0, 0, True)]
        if moved:
            raise ValueError(
                "parameters that do not require gradients, or are in no optimizer, must not change in local training, "
                f"found changes in {_some(moved)}: no update holds them, so one client would hand them to the next; "
                "make them buffers, which are combined after every round, as such parameters are where they have the "
                "shape of a trained one"
            )

    def _frozen_marks(self) -> dict[str, Tensor]:
        frozen = {n: p.detach() for n, p in still_parameters(self.module, self.layout.names).items()}
        return {n: p.to(accumulation_device(p)).sum(dtype=torch.float64) for n, p in frozen.items() if _has_sum(p)}

    def check_flags(self) -> None:
        """Makes sure that a client has frozen nothing for good; one that each step trains before has a gradient."""
        found = zip(self.layout.names, self.parameters, strict=True)
        names = [n for n, p in found if not p.requires_grad and (p.grad is None or not p.grad.any())]
        if names:
            raise ModuleError(
                "the trained parameters must not change during a fit, and requires_grad comes back after every client, "
                f"found {_some(names)} frozen in local training: freeze in the module's __init__, setup or "
                "on_fit_start, or let steps that freeze and thaw in turn end with requires_grad_(True)"
            )

    def restore_flags(self) -> None:
        """Brings ``requires_grad`` back to what it was when the round began, also after a step that broke off."""
        for parameter, flag in self._flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)

    def bind(self, views: Sequence[Tensor]) -> None:
        """Points the parameters at views with their shapes, and forgets gradients."""
        self.sync()  # or what hooks have assigned to parameters would be lost
        self._at_global = views is self.global_views
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
            parameter.grad = None
        for parameter in self._idle:
            parameter.grad = None  # no optimizer zeroes it: it would grow from client to client

    def bind_flat(self, flat: Tensor) -> None:
        """Points the parameters at an ``[n]`` vector, or at a copy if it does not start at a 64-byte boundary."""
        self.bind(self.layout.views(aligned(flat)))

    def bind_global(self) -> None:
        """Points the parameters back at the global vector."""
        self.bind(self.global_views)

    @contextmanager
    def showing(self, flat: Tensor) -> Iterator[None]:
        """Lets the parameters show a contiguous ``[n]`` vector for a moment; gradients stay."""
        bound = [parameter.data for parameter in self.parameters]
        for parameter, view in zip(self.parameters, self.layout.views(flat), strict=True):
            parameter.data = view
        try:
            yield
        finally:
            for parameter, data in zip(self.parameters, bound, strict=True):
                parameter.data = data

    def sync(self) -> None:
        """Takes over what was assigned to parameters while they were bound to the global vector.

        Wrong shapes are left for :meth:`check` to refuse, so that nothing is raised while a fit comes to its end.
        """
        if self._at_global:
            for parameter, view in zip(self.parameters, self.global_views, strict=True):
                if parameter.shape == view.shape:
                    _copy_if_elsewhere(parameter, view)

    def reclaim(self, views: Sequence[Tensor]) -> None:
        """Fetches the values of parameters that got another storage since they were bound to these views.

        ``p.data = p.data.clamp(-1, 1)`` and ``rnn.flatten_parameters()`` do that. Another shape is a ValueError.
        """
        for name, parameter, view in zip(self.layout.names, self.parameters, views, strict=True):
            if parameter.shape != view.shape:
                found = f"{tuple(view.shape)} become {tuple(parameter.shape)}"
                raise ValueError(f"parameter {name!r} must keep its shape during a fit, found {found}")
            _copy_if_elsewhere(parameter, view)

    def release(self) -> None:
        """Gives every parameter a storage of its own again, so that the module no longer depends on ``theta``."""
        self.sync()
        for parameter, view, like in zip(self.parameters, self.global_views, self._formats, strict=True):
            parameter.data = torch.empty_like(like, device=view.device).copy_(view)


def _copy_if_elsewhere(parameter: Tensor, view: Tensor) -> None:
    if parameter.data_ptr() != view.data_ptr() or parameter.stride() != view.stride():
        view.copy_(parameter.data)


def _has_sum(tensor: Tensor) -> bool:
    return tensor.dtype.itemsize > 1


def _some(names: Sequence[str], shown: int = 5) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(repr(name) for name in names[:shown]) + rest
