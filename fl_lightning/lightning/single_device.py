# SPDX-License-Identifier: Apache-2.0
"""What a Trainer hands to a strategy: devices, plugins, data, and the limits on batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

from fl_lightning.core.storage.rule_state import full_state_dict, has_shards
from fl_lightning.lightning.checkpoint_io import STATE_KEY, AtomicCheckpointIO, federated_state
from fl_lightning.lightning.names import (
    LightningDataModule,
    SingleDeviceStrategy,
    Trainer,
    TrainerFn,
    lightning_module,
    rank_zero_warn,
)
from fl_lightning.lightning.rank_processes import HeldSignals, check_startable, is_termination
from fl_lightning.lightning.ranks import Ranks
from fl_lightning.lightning.shared_by_ranks import (
    broadcast_module,
    broadcast_random_state,
    epoch_logs_quiet,
    unsynced_metrics,
)

_T = TypeVar("_T")
_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches")


class OneDevice(SingleDeviceStrategy):
    """Runs a fit on one device per process, in one process or in several that Lightning starts.

    It follows whichever trainer uses it. To modules and callbacks several processes are one fit on one device.
    """

    def __init__(self, timeout: timedelta = timedelta(minutes=30)) -> None:
        if timeout <= timedelta(0):
            raise ValueError(f"timeout of {type(self).__name__} must be longer than 0 s, found {timeout!r}")
        self._given: dict[str, Any] = {}
        super().__init__()
        self.limits: dict[str, int | float] = {}  # on batches, of the trainer, while they are applied per client
        self.ranks: Ranks | None = None
        self._timeout, self._undo = timeout, ExitStack()

    # ---- what a trainer hands over, in this order

    @property
    def cluster_environment(self) -> Any:
        """Of the trainer that was made last with this strategy; ``None`` between trainers."""
        return self._given.get("cluster_environment")

    @cluster_environment.setter
    def cluster_environment(self, environment: Any) -> None:
        self._given["cluster_environment"] = environment

    @property
    def parallel_devices(self) -> None:
        """Always None, so that Lightning hands over the devices of every trainer anew."""
        return

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._given["devices"] = list(devices or [torch.device("cpu")])

    @property
    def num_nodes(self) -> int:
        """Machines that take part."""
        return int(self._given.get("num_nodes", 1))

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._given["num_nodes"] = num_nodes

    def set_world_ranks(self) -> None:
        """Everything was handed over: finds this process's place and device."""
        devices, environment = self._given["devices"], self.cluster_environment
        number = len(devices) * self.num_nodes
        check_devices(devices, number, environment)
        self.ranks = None
        self._root_device, self.global_rank, self.local_rank, self.node_rank = devices[0], 0, 0, 0
        if devices[0].type == "cpu":
            self._root_device = torch.device("cpu")
        if number > 1:
            check_startable(environment)
            ranks = self.ranks = Ranks(self.accelerator, devices, environment, self.num_nodes, self._timeout)
            self._root_device = ranks.device
            self.global_rank, self.local_rank, self.node_rank = ranks.rank, ranks.local_rank, ranks.node_rank

    def _configure_launcher(self) -> None:
        self._launcher = None if self.ranks is None else self.ranks.launcher

    # ---- several processes

    def setup_environment(self) -> None:
        """Connects the processes."""
        super().setup_environment()
        if self.ranks is not None:
            self.ranks.join()
            broadcast_random_state(self.ranks)

    def setup(self, trainer: Trainer) -> None:
        """Gives all processes the weights of the first."""
        super().setup(trainer)
        if self.ranks is not None:
            broadcast_module(self.ranks, trainer.lightning_module)
            self._undo.enter_context(unsynced_metrics(trainer.lightning_module))
            self._undo.enter_context(epoch_logs_quiet())
            if trainer.state.fn == TrainerFn.FITTING:
                self.ranks.signals = signals = HeldSignals(trainer)
                self._undo.enter_context(signals.holding())

    def abandon(self, exception: BaseException) -> None:
        """The trainer function ends with an exception, in this process alone unless it is a signal that all follow."""
        if self.ranks is not None and not is_termination(exception):
            self.ranks.abandon()

    def teardown(self) -> None:
        """Leaves the module's metrics as they were, and lets another trainer hand over its plugins."""
        self._undo.close()
        if self.ranks is not None:
            self.ranks.signals = None
            self.ranks.part()
        self._given.pop("cluster_environment", None)
        super().teardown()

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first process, which alone writes logs and checkpoints."""
        return self.global_rank == 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all processes."""
        if self.ranks is not None:
            self.ranks.barrier()

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        """The object of one process, on all."""
        return obj if self.ranks is None else self.ranks.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """What all processes, or any of them, have decided."""
        if self.ranks is None:
            return decision
        decisions = self.ranks.gather(decision)
        return decisions.count(True) == len(decisions) if all else any(decisions)

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

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Saves a checkpoint; called by all processes. What they hold in columns comes to the first, which writes it.

        A process that has left the fit with an error saves none that needs the columns of others; it warns.
        """
        state = federated_state(checkpoint)
        if has_shards(state):
            if self.ranks is not None and self.ranks.abandoned:
                rank_zero_warn(f"{filepath} is not saved: other processes hold parts of it, and this one has left them")
                return
            checkpoint["callbacks"] = {**checkpoint["callbacks"], STATE_KEY: full_state_dict(state)}
        super().save_checkpoint(checkpoint, filepath, storage_options)

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

    def restore_limits(self, trainer: Trainer) -> None:
        """The trainer is as its user made it."""
        for name, limit in self.limits.items():
            setattr(trainer, name, limit)
        self.limits = {}


def check_devices(devices: Sequence[torch.device], number: int, environment: Any) -> None:
    """Checks what kind of devices and how many processes a trainer asks for."""
    kind = devices[0].type
    if kind not in ("cpu", "cuda", "mps"):
        raise ValueError(f"FederatedStrategy runs on CPU, CUDA or MPS, found {devices[0]}")
    if kind == "mps" and number > 1:
        raise ValueError(f"MPS has one device, found Trainer(devices=...) that asks for {number} processes")
    torchrun = lightning_module("plugins.environments").TorchElasticEnvironment
    if number == 1 and isinstance(environment, torchrun) and environment.world_size() > 1:
        raise ValueError(
            f"torchrun has started {environment.world_size()} processes, and Trainer(devices=1, num_nodes=1) uses one: "
            "each would run the whole fit and write the same files. Pass Trainer(devices=..., num_nodes=...) as given "
            "to torchrun"
        )


def data_owners(trainer: Trainer) -> dict[str, Any]:
    """By stage: the module or data module to ask for loaders, or the loaders themselves; predictions have none."""
    loops: dict[TrainerFn | None, dict[str, Any]] = {
        TrainerFn.FITTING: {"train": trainer.fit_loop, "val": trainer.fit_loop.epoch_loop.val_loop},
        TrainerFn.VALIDATING: {"val": trainer.validate_loop},
        TrainerFn.TESTING: {"test": trainer.test_loop},
    }
    sources = {stage: loop._data_source for stage, loop in loops.get(trainer.state.fn, {}).items()}
    return {stage: source.instance for stage, source in sources.items() if source.is_defined()}


@contextmanager
def data_replaced(trainer: Trainer, data: LightningDataModule) -> Iterator[None]:
    """Lets the trainer function run as if it had been called with this data module."""
    fit_loop: Any = trainer.fit_loop
    loops = (fit_loop, fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    connector, datamodule = trainer._data_connector, trainer.datamodule  # type: ignore[attr-defined]
    instances, selector = [loop._data_source.instance for loop in loops], connector._datahook_selector
    connector.attach_datamodule(trainer.lightning_module, data)
    try:
        yield
    finally:
        for loop, instance in zip(loops, instances, strict=True):
            loop._data_source.instance = instance
        connector._datahook_selector = selector
        trainer.datamodule = datamodule  # type: ignore[attr-defined]
