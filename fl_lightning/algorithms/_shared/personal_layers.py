# SPDX-License-Identifier: Apache-2.0
"""What FedBN, FedPer and FedRep share: layers that stay at their client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.records import ClientReport, LocalWork
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.model_snapshot import Layers, ModelPart, Snapshot, packed, put_flat, unpack
from fl_lightning.core.modules import named_model_buffers, outside_metrics, submodules, trained_parameters
from fl_lightning.core.storage.at_clients import at_clients
from fl_lightning.core.storage.declared import plain


class PersonalLayers(ClientRule):
    """Some layers, parameters and persistent buffers alike, are each client's own and are never sent.

    A client trains the received model with its own values of these layers in place. Its update is zero there, so the
    global model keeps the values with which training began; they are a client's own until its first report counts.
    Between rounds the layers lie in files of ``directory``, or without one in memory on the CPU and in the checkpoint.
    """

    own = at_clients(files="directory", size="part_bytes")

    def __init__(
        self, method: str, directory: str | None = None, names: Sequence[str] | None = None, count: int = 1
    ) -> None:
        self.method, self.directory, self.names, self.count = method, directory, names, count
        self._received: tuple[Tensor, Tensor] | None = None
        self.part_bytes = 0  # of one client's layers

    def find(self, module: nn.Module, layout: ParamLayout) -> Layers:
        """The layers that stay at a client: those under ``names``, or the last ``count`` with trained parameters."""
        return layers_under(module, layout, self.names, self.count, self.method)

    def refusal(self, server: ServerRule) -> str | None:
        """Losses and gradients at the global model say nothing about clients with layers of their own."""
        asked = [name for name in ("losses", "accuracies", "requery", "full_gradients") if getattr(server.needs, name)]
        if not asked:
            return None
        what = asked[0].replace("_", " ")
        return f"keeps layers at the clients, and {type(server).__name__} asks for {what} at the global model"

    def check_module(self, module: nn.Module, layout: ParamLayout) -> None:
        """Finds the layers."""
        layers = self.find(module, layout)
        trained = trained_parameters(module, layout.names)
        if not trained.keys() - layers.parameters:
            raise ValueError(f"{self.method} must leave clients something to share, found all parameters in {layers}")
        own = [trained[name] for name in layers.parameters] + layers.buffers_of(module)
        self.part_bytes = sum(value.numel() * value.element_size() for value in own)

    def personal_model(self, client_id: int) -> ModelPart | None:
        """The client's layers, or ``None`` before the end of its first round."""
        held = self.own.get(client_id)
        return None if held is None else ModelPart(held, self.find)

    @torch.no_grad()
    def begin_client(self, work: LocalWork) -> None:
        """Puts the client's layers in the places of those received."""
        layers, device = self.find(work.module, work.layout), work.params.device
        buffers = layers.buffers_of(work.module)
        self._received = _joined(layers.of(work.parameters, work.layout), work.params), packed(buffers, device)
        held = self.own.get(work.client_id)
        if held is not None:
            self._put(work, layers, held.params.to(work.params), held.buffers.to(device))

    @torch.no_grad()
    def end_client(self, work: LocalWork) -> ClientReport:
        """Keeps the client's layers, and puts those received back: the update is zero there."""
        assert self._received is not None
        layers, cpu = self.find(work.module, work.layout), torch.device("cpu")
        own = _joined(layers.of(work.parameters, work.layout), work.params).to(cpu)
        buffers = packed(layers.buffers_of(work.module), cpu)
        self._put(work, layers, *self._received)
        self._received = None
        if not bool(own.isfinite().all()):
            raise ValueError(f"the layers of client {work.client_id} diverged under {self.method}: lower the rate")
        return ClientReport(local_state={"own": plain(Snapshot(own, buffers))})

    def _put(self, work: LocalWork, layers: Layers, params: Tensor, buffers: Tensor) -> None:
        put_flat(params, [parameter.data for parameter in layers.of(work.parameters, work.layout)])
        unpack(buffers, layers.buffers_of(work.module))


def layers_under(
    module: nn.Module, layout: ParamLayout, names: Sequence[str] | None, count: int, method: str
) -> Layers:
    """The layers of submodules, with all that is below them, or the last ``count`` that own trained parameters."""
    parts = submodules(module)
    # Tied parameters are in several places; the first of them gives the name.
    trained = {id(parameter): name for name, parameter in trained_parameters(module, layout.names).items()}
    held = [(f"{o}.{key}", p) for o, part in parts for key, p in part.named_parameters(recurse=False)]
    held = [(place, parameter) for place, parameter in held if id(parameter) in trained]
    owners = list(dict.fromkeys(place.rpartition(".")[0] for place, _ in held))
    known = {name for name, _ in parts if name}
    if names is None:
        if len(owners) <= count:
            raise ValueError(f"{method} needs more than {count} layers with parameters, found {owners}")
        names = owners[-count:]
    for name in names:
        if name not in known or not any(_under(place, name) for place, _ in held):
            near = ", ".join(sorted({owner for owner in owners if owner}))
            raise ValueError(f"personal of {method} must name submodules with trained parameters, such as {near}; "
                             f"found {name!r}")  # fmt: skip
    shared = {id(parameter): place for place, parameter in held if not any(_under(place, name) for name in names)}
    for place, parameter in held:
        if id(parameter) in shared and any(_under(place, name) for name in names):
            raise ValueError(
                f"personal of {method} must name all layers that share a parameter, found {place!r}, which is "
                f"{shared[id(parameter)].lstrip('.')!r}, too: name both layers, or untie them"
            )
    buffers = [name for name, _ in named_model_buffers(module)]
    return _layers(layout, buffers, lambda name: any(_under(name, owner) for owner in names))


def layers_of_type(module: nn.Module, layout: ParamLayout, kind: type[nn.Module]) -> Layers:
    """The layers of all submodules of a type."""
    owners = [name for name, part in outside_metrics(submodules(module)) if isinstance(part, kind)]
    buffers = [name for name, _ in named_model_buffers(module)]
    return _layers(layout, buffers, lambda name: name.rpartition(".")[0] in owners)


def _layers(layout: ParamLayout, buffers: Collection[str], is_theirs: Callable[[str], bool]) -> Layers:
    return Layers(frozenset(filter(is_theirs, layout.names)), frozenset(filter(is_theirs, buffers)))


def _under(name: str, owner: str) -> bool:
    return name.startswith(f"{owner}.")


def _joined(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)
