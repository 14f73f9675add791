# SPDX-License-Identifier: Apache-2.0
"""The module of a server: parameters that rounds step, buffers and attributes that they change, and what is shown."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.buffers import BufferBank
from fl_lightning.clients.module_isolation import ModuleIsolation
from fl_lightning.clients.update_rows import Upload
from fl_lightning.core.modules import frozen_digest, state_on_cpu
from fl_lightning.federation.message_checks import printable
from fl_lightning.federation.module_changes import LIMITS, received
from fl_lightning.fit.options import FitOptions
from fl_lightning.fit.uploads import merge_module_changes
from fl_lightning.lightning.metric_state import MetricDelta, updates_of
from fl_lightning.lightning.module.changes import Change, on_cpu, written
from fl_lightning.lightning.module.snapshot import ModuleSnapshot
from fl_lightning.lightning.names import LightningModule, rank_zero_warn
from fl_lightning.lightning.optimizers import configured_optimizers

_MAX_WARNINGS = 32
_DTYPES = {"32-true": None, "64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class ServedModel:
    """A module whose parameters belong to a server; its ``configure_optimizers`` must need no data.

    ``binding`` has its parameters, bound to the global ones, and ``home`` its attributes and metrics. ``plain`` is what
    rounds have changed in attributes, as messages hold it, and ``frozen`` a digest of its parameters without gradients.
    """

    def __init__(self, module: LightningModule, options: FitOptions, precision: str, device: str) -> None:
        module.configure_model()
        self.module = module.to(device=device, dtype=_DTYPES[precision])
        self._algorithm = options.algorithm
        optimizers = configured_optimizers(self.module)
        self.binding = BoundParameters(self.module, options.algorithm.layers, optimizers)
        options.client_rule.check_module(self.module, self.binding.layout)
        self.buffers = BufferBank(self.module, options.buffers, self.binding.layout.names)
        self.params = self.binding.theta  # [n] the global parameters
        self.server_module, self.plain = ModuleAtServer(self.module, self.params.device), dict[str, Any]()
        self.frozen = frozen_digest(self.module, self.binding.layout.names)

    @property
    def evaluated(self) -> Tensor:
        """``[n]`` the parameters that the method wants evaluated; the global ones themselves, if it is these."""
        return self._algorithm.evaluation_params(self.params)

    def merge(self, uploads: Sequence[Upload], counted: Collection[int]) -> None:
        """Joins what visits of a round have left in attributes and metrics."""
        merge_module_changes(self.server_module.isolation, uploads, counted)
        self.plain = self.server_module.plain()

    def module_state_dict(self) -> dict[str, Tensor]:
        """The module's state with the parameters to evaluate, copied to the CPU."""
        with self.binding.showing(self.evaluated.contiguous()):
            return state_on_cpu(self.module)

    def state_dict(self) -> dict[str, Any]:
        """What a bit-exact continuation needs of the module."""
        return {
            "state_dict": self.module_state_dict(),
            "params": self.params.clone(),
            "buffers": {name: value.clone() for name, value in self.buffers.global_values().items()},
            "module": self.server_module.plain(metrics=True),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned."""
        self.module.load_state_dict(state["state_dict"])
        self.params.copy_(state["params"])
        self.buffers.put(state["buffers"])
        self.buffers.remember()
        self.server_module.load(state["module"])
        self.plain = self.server_module.plain()

    def release(self) -> None:
        """The module keeps the parameters to evaluate, in memory of its own."""
        if self.evaluated is not self.params:
            self.params.copy_(self.evaluated)
        self.binding.release()


class ModuleAtServer:
    """A server's module, which rounds change as they do in a fit."""

    def __init__(self, module: LightningModule, device: torch.device) -> None:
        self._module, self._device, self._warned = module, device, set[str]()
        self.isolation, self._first = ModuleIsolation(module), ModuleSnapshot(module)

    def plain(self, metrics: bool = False) -> dict[str, Any]:
        """What rounds have changed since the module was made.

        ``metrics`` adds what metrics have gathered, which no client needs: its visits begin with empty ones.
        """
        found = self._first.joined.items() if metrics else ()
        deltas = {name: MetricDelta.of(metric) for name, metric in found if updates_of(metric)}
        change = written(self._first, self._first.changed(), deltas, LIMITS)
        for name, why in change.lost.items():
            self._forget(name)
            self._warn_once(name, f"{name!r} begins anew at every client: {why}")
        return on_cpu(change.plain)

    def _forget(self, name: str) -> None:
        if name in self._first.joined:
            self._first.joined[name].reset()
        for found in self._first.changed():
            if name in found.changed_names():
                found.restore()

    def _warn_once(self, name: str, words: str) -> None:
        if name not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(name)
            rank_zero_warn(f"of what clients leave in {type(self._module).__name__}, {words}")

    def read(self, plain: Mapping[str, Any]) -> Change:
        """What a client has left; raises MessageError if it is none, or does not fit the module."""
        for name in sorted(received(plain, self.isolation.take_snapshot(), self._device).lacking):
            self._warn_once(
                printable(name), f"{printable(name)!r} is not among what the server's module has: it stays with them"
            )
        return Change(plain)

    def load(self, plain: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`plain` gave with metrics."""
        self._first.restore()
        found = received(plain, self._first, self._device)
        for one, form, values in found.changes:
            one.apply(form, values)
        for metric, delta in found.metrics:
            metric.reset()
            delta.add_to(metric)
