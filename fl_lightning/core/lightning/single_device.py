# SPDX-License-Identifier: Apache-2.0
"""What a Trainer hands to a strategy: one device, plugins, and the limits on batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fl_lightning.core.lightning.checkpoint_io import AtomicCheckpointIO
from fl_lightning.core.lightning.names import (
    SingleDeviceStrategy,
    Trainer,
    lightning_module,
)

_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches")


class OneDevice(SingleDeviceStrategy):
    """A single-device strategy that follows whichever trainer uses it, on CPU, CUDA or MPS.

    Attributes:
        limits: the trainer's limits on batches while the strategy applies them per client.
    """

    def __init__(self) -> None:
        self._given: dict[str, Any] = {}
        super().__init__()
        self.limits: dict[str, int | float] = {}

    @property
    def parallel_devices(self) -> None:
        """Always None, so that Lightning hands over the devices of every trainer anew."""
        return

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._root_device = refuse_devices(devices)

    @property
    def num_nodes(self) -> int:
        """Always 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise ValueError(f"FederatedStrategy runs on one node: pass Trainer(num_nodes=1), found {num_nodes}")

    # Lightning takes what lies in a strategy's own fields for the user's choice, against which a second trainer's
    # accelerator, precision or plugins would be refused or ignored. What a trainer hands over is kept elsewhere.

    @property
    def accelerator(self) -> Any:
        """Of the trainer that was made last with this strategy."""
        return self._given.get("accelerator")

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        self._given = {"accelerator": accelerator}  # a trainer hands this over first

    @property
    def precision_plugin(self) -> Any:
        """Of the trainer that was made last with this strategy."""
        return self._given.get("precision_plugin") or super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        self._given["precision_plugin"] = precision_plugin

    @property
    def checkpoint_io(self) -> Any:
        """Writes checkpoints atomically unless another plugin was given."""
        io = self._given.setdefault("checkpoint_io", AtomicCheckpointIO())
        if getattr(io, "checkpoint_io", io) is None:  # a wrapper, such as AsyncCheckpointIO
            io.checkpoint_io = AtomicCheckpointIO()
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._given["checkpoint_io"] = io

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Restores the weights, in double precision if that is what the fit runs in."""
        if isinstance(self.precision_plugin, lightning_module("plugins.precision").DoublePrecision):
            # Lightning converts the module after it has loaded the weights, which would round them.
            self.precision_plugin.convert_module(self.lightning_module)
        super().load_model_state_dict(checkpoint, strict)

    def take_limits(self, trainer: Trainer) -> None:
        """Lightning would count clients; per-client limits are applied where batches are drawn."""
        for name in _LIMITS:
            self.limits[name] = limit = getattr(trainer, name)
            if limit != 0:
                setattr(trainer, name, 1.0)

    def give_limits_back(self, trainer: Trainer) -> None:
        """The trainer is as its user made it."""
        for name, limit in self.limits.items():
            setattr(trainer, name, limit)
        self.limits = {}


def refuse_devices(devices: Sequence[torch.device] | None) -> torch.device:
    """Returns the one device to run on.

    Raises:
        ValueError: more than one device, or a kind that is not supported.
    """
    found = list(devices or [torch.device("cpu")])
    if found[0].type == "cpu":
        # Lightning counts CPU "devices" as processes; one device object stands for each.
        if len(found) > 1:
            raise ValueError(f"FederatedStrategy runs on one device: pass Trainer(devices=1), found {len(found)}")
        return torch.device("cpu")
    if len(found) > 1:
        raise ValueError(f"FederatedStrategy runs on one device: pass Trainer(devices=1), found {found}")
    if found[0].type not in ("cuda", "mps"):
        raise ValueError(f"FederatedStrategy runs on CPU, CUDA or MPS, found {found[0]}")
    return found[0]
