# SPDX-License-Identifier: Apache-2.0
"""FederatedClient: one client of a real federation, which trains when its server sends a message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from fl_lightning.arguments import ANY, Bounds, Example, altered, check, checked
from fl_lightning.clients.client_batches import ClientBatches
from fl_lightning.core.layout import ParamLayout, names_in
from fl_lightning.core.modules import frozen_digest
from fl_lightning.core.records import EvaluationRecord
from fl_lightning.core.storage import rule_state
from fl_lightning.core.storage.at_clients import ClientStateStore
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.partitions import IID
from fl_lightning.data.sources import AnyDataset
from fl_lightning.federation.client_visit import VisitStrategy, Work
from fl_lightning.federation.message_checks import read
from fl_lightning.federation.messages import ClientIntroduction, ClientMessage, ServerMessage
from fl_lightning.federation.module_changes import ModuleAtClient
from fl_lightning.fit.strategy import FederatedStrategy
from fl_lightning.lightning.fit_description import FitDescription
from fl_lightning.lightning.inspection import accumulation, is_overridden
from fl_lightning.lightning.names import LightningDataModule, LightningModule, Trainer, quiet
from fl_lightning.lightning.optimizers import configured_optimizers, trained_names

_OWN = ("strategy", "max_epochs", "min_epochs", "max_steps", "min_steps", "max_time")


class FederatedClient:
    """One client of a federation whose server is elsewhere: in another process, on another machine, or a loop by hand.

    :meth:`train` is one client's part of one round. With the same strategy and data it gives the same bits as that
    client in ``trainer.fit``. It depends on the message and on what the client kept of its last visit that counted, and
    on nothing else, so the process may end between rounds.

    Every call makes a Trainer and runs one ``trainer.fit``: ``setup``, ``configure_optimizers`` and the other hooks of
    module and data run each time. ``trainer.current_epoch`` is the round; ``trainer.global_step`` begins at the round
    times :attr:`ServerMessage.steps_per_round`, or times its own steps. The module ends with the global parameters that
    it received, and otherwise as it was.

    Args:
        module: an unchanged LightningModule.
        data: the client's own training data, as a LightningDataModule, DataLoader, dataset, or a LightningModule that
            has its loader with it. Or the data of all clients as a :class:`fl_lightning.FederatedDataModule`.
        strategy: the server's, of which the client half of the method and the options of local training count here. The
            client takes a copy of them.
        client_id: the client, from 0.
        num_clients: registered clients; left out if ``data`` has them all.
        trainer: further arguments of the Trainer, such as ``accelerator``, ``precision`` and ``limit_train_batches``. A
            client is one process with one device.
        folder: where what stays at the client lives (personal models, last local models, kept optimizers): files
            ``client-<id>/round-<when>.pt``. ``None``: in the memory of this object.

    Attributes:
        client_id: the client.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or ``strategy`` has a ``partition`` or a client rule that does not say
            where its state lives.
    """

    @checked(module=Example("fl.ClientModule(net)"), data=ANY, client_id=Bounds(0), num_clients=Bounds(1))
    def __init__(
        self,
        module: LightningModule,
        data: LightningDataModule | LightningModule | AnyDataset,
        strategy: FederatedStrategy,
        client_id: int,
        num_clients: int | None = None,
        trainer: Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        self._options = strategy.options.for_federation()
        if isinstance(data, FederatedDataModule):
            if num_clients is not None:
                raise ValueError(f"num_clients must be left out where data has all clients, found {num_clients}")
        elif num_clients is None or client_id >= num_clients:
            raise ValueError(
                "client_id and num_clients must be given with one client's own data, the first from 0 and below the "
                f"second, found {client_id} and {num_clients}"
            )
        else:
            data = FederatedDataModule(data, IID(1))
        self._trainer = dict(trainer or {})
        for name in _OWN:
            if name in self._trainer:
                raise ValueError(f"trainer must leave {name} to the visit, found {name}={self._trainer[name]!r}")
        self.client_id, self._module, self._data, self._num_clients = client_id, module, data, num_clients
        with quiet():
            self._trainer_with("auto")
        self._states, self._warned = ClientStateStore(client_id, folder), set[str]()
        self._keeps = self._options.keeps_optimizer or rule_state.has_local_state(self._options.client_rule)

    @property
    def fit_description(self) -> FitDescription:
        """What this client is about to compute, to be compared with what its server says before the first round.

        Raises:
            ValueError: the module has no parameters yet (``configure_model``, lazy layers), or its
                ``configure_optimizers`` needs data.
        """
        options, trained = self._options, trained_names(self._module, configured_optimizers(self._module))
        layout = ParamLayout.from_module(self._module, options.algorithm.layers, trained)
        return FitDescription.of(
            options.algorithm, options.client_rule, layout, called=options.called, clients=self._num_clients,
            settings=options.client_settings(),
        )  # fmt: skip

    def train(self, message: ServerMessage | Mapping[str, Any]) -> ClientMessage:
        """One round of this client; the same message again gives the same answer again.

        Args:
            message: from the server: a message, or its fields.

        Raises:
            FileNotFoundError: what the client kept of round ``message.counted`` is gone.
            ValueError: the message does not fit the module, or module or data lack what the method needs.
        """
        sent = self._visit(message, "train").sent
        assert sent is not None
        return sent

    def loss(self, message: ServerMessage | Mapping[str, Any]) -> float:
        """This client's loss at ``message.params``, for methods that ask again (:attr:`Cohort.losses_at`).

        Args:
            message: that of the round, with other parameters.

        Raises:
            ValueError: as :meth:`train`.
        """
        return self._visit(message, "loss").loss

    def evaluate(
        self, message: ServerMessage | Mapping[str, Any], stage: Literal["val", "test"] = "val"
    ) -> EvaluationRecord | None:
        """What the module logs of this client's data at ``message.params``, and of its personal model if it has one.

        The values are those of this client in ``trainer.validate`` or ``trainer.test`` of all.

        Args:
            message: that of the round; where the method evaluates other parameters, with those.
            stage: which data.

        Returns:
            The record of this client alone; ``None`` without data of the stage, or a step for it in the module.

        Raises:
            FileNotFoundError: as :meth:`train`.
            ValueError: as :meth:`train`.
        """
        check("stage of evaluate", stage, Literal["val", "test"])
        step = "validation_step" if stage == "val" else "test_step"
        if not (is_overridden(step, self._module) and is_overridden(f"{stage}_dataloader", self._data)):
            return None
        return self._visit(message, stage).record

    def state_dict(self, message: ServerMessage | Mapping[str, Any]) -> dict[str, Tensor]:
        """The module's state as this client uses it: its own model or layers where the method has any, on the CPU.

        Args:
            message: :meth:`FederatedServer.evaluation_message`.

        Raises:
            FileNotFoundError: as :meth:`train`.
            ValueError: as :meth:`train`.
        """
        with self._visiting(read(ServerMessage, message), "test") as visit:
            return visit.own_state(self._module, self._num_clients or self._data.num_clients)

    def introduction(self) -> ClientIntroduction:
        """What a server hears of this client before the first round. The data are set up and torn down.

        Raises:
            ValueError: as :attr:`fit_description`.
        """
        data, own = self._data, self._num_clients is not None
        with quiet():
            data.prepare_data()
            data.setup("fit")
            trainer = self._trainer_with("auto")
        loaders, place = data.train_dataloader(), 0 if own else self.client_id
        limit, window = trainer.limit_train_batches, accumulation(trainer)
        batches = ClientBatches(loaders, self._options, limit, window, self._module)
        size = len(loaders.indices(place))
        full = self._options.needs.full_gradients
        described = self.fit_description
        described = described if own else altered(described, clients=len(loaders))
        data.teardown("fit")
        return ClientIntroduction(
            client_id=self.client_id,
            name=str(self.client_id) if own else loaders.names[place],
            size=size,
            steps=min(size, 1) if full else batches.expected_steps(place),
            description=described.state_dict(),
            frozen=frozen_digest(self._module, names_in(described.layout)),
        )

    def _trainer_with(self, strategy: Any, **options: Any) -> Trainer:
        trainer = Trainer(
            **{
                "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
                "enable_model_summary": False, "log_every_n_steps": 1, "devices": 1, **self._trainer, **options,
            },
            strategy=strategy,
        )  # fmt: skip
        if trainer.num_devices > 1 or trainer.num_nodes > 1:
            raise ValueError(
                "trainer must have one device on one node, because a client is one process, found "
                f"num_devices={trainer.num_devices} and num_nodes={trainer.num_nodes}: pass devices=1, or the list of "
                "the one device"
            )
        return trainer

    @contextmanager
    def _visiting(self, message: ServerMessage, work: Work) -> Iterator[VisitStrategy]:
        """What the client does for a message, with what it kept, on the module as the message has it."""
        before = self._states.restore(message.counted) if self._keeps and work != "loss" else None
        with ModuleAtClient(self._module, message.module, self._warned) as module, quiet():
            yield VisitStrategy(self._options, self.client_id, self._num_clients, message, before, module, work)

    def _visit(self, message: ServerMessage | Mapping[str, Any], work: Work) -> VisitStrategy:
        message = read(ServerMessage, message)
        with self._visiting(message, work) as visit:
            if work in ("val", "test"):
                trainer = self._trainer_with(visit)
                evaluate = trainer.validate if work == "val" else trainer.test
                evaluate(self._module, datamodule=self._data, verbose=False)
            else:
                rounds = message.rounds or message.round + 1
                trainer = self._trainer_with(visit, max_epochs=rounds, limit_val_batches=0, num_sanity_val_steps=0)
                trainer.fit(self._module, self._data)
        if visit.sent is not None and self._keeps:
            self._states.save(message.round, visit.state_after)
        return visit
