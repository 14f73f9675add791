# SPDX-License-Identifier: Apache-2.0
"""One ``trainer.validate`` or ``trainer.test`` that evaluates one client, at parameters that its server sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fl_lightning.algorithms.records import Federation
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.buffers import BufferBank
from fl_lightning.clients.trained import trained_names
from fl_lightning.core.records import EvaluationRecord
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.federation.messages import ServerMessage, give
from fl_lightning.fit.checks import check_trainer
from fl_lightning.fit.client_options import ClientOptions
from fl_lightning.fit.evaluation.evaluator import Evaluator
from fl_lightning.fit.evaluation.report import EvaluationReport
from fl_lightning.fit.state_callback import FederatedState
from fl_lightning.lightning.names import Callback, LightningModule, Trainer
from fl_lightning.lightning.optimizers import configured_optimizers
from fl_lightning.lightning.round_progress import RoundProgress
from fl_lightning.lightning.single_device import OneDevice


class VisitEvaluation(OneDevice):
    """Evaluates one client on its own data, and its personal model beside the parameters of the message.

    Args:
        options: how clients train.
        client_id: the client.
        num_clients: registered clients; ``None``: those that the data have.
        message: what the server sent; its parameters are those to evaluate.
        kept: what the client kept of its last visit that counted; ``None`` without one.
        stage: which data.
    """

    def __init__(
        self,
        options: ClientOptions,
        client_id: int,
        num_clients: int | None,
        message: ServerMessage,
        kept: Mapping[str, Any] | None,
        stage: Literal["val", "test"],
    ) -> None:
        super().__init__()
        self._options, self._message, self._kept = options, message, kept
        self._client_id, self._num_clients, self._stage = client_id, num_clients, stage
        self._binding: BoundParameters | None = None
        report, rule = _AsFound(None, "max"), options.client_rule
        self._evaluator = Evaluator(self, options.algorithm, rule, options.seed, report)

    @property
    def record(self) -> EvaluationRecord | None:
        """What was found; ``None`` if the client has no data of the stage."""
        return self._evaluator.record

    def connect(self, model: LightningModule) -> None:
        """Lets the evaluation hear of the trainer's hooks, in the epoch that the message names."""
        super().connect(model)
        trainer = model.trainer
        check_trainer(trainer)
        progress = RoundProgress(trainer)
        progress.begin_at(self._message.round)
        state = FederatedState(self, self._evaluator)
        state.attach(progress)
        trainer.callbacks.insert(0, state)  # type: ignore[attr-defined]
        self.take_limits(trainer)

    def setup(self, trainer: Trainer) -> None:
        """Moves the module to its device, and takes the message."""
        super().setup(trainer)
        module, message = trainer.lightning_module, self._message
        trained = trained_names(module, configured_optimizers(module))
        binding = self._binding = BoundParameters(module, self._options.algorithm.layers, trained)
        message.check_params(binding.theta)
        binding.theta.copy_(message.params)
        buffers = BufferBank(module, self._options.buffers, trained)
        if message.buffers:
            buffers.put(message.buffers)
        rule, client = self._options.client_rule, self._client_id
        give(message, rule, client)
        if self._kept is not None and self._kept["rule"]:
            rule.keep(client, self._kept["rule"], self._kept["round"])
        theta, clients = binding.theta, self._num_clients or client + 1
        rule.begin_fit(Federation(clients, binding.layout, theta.device, theta.dtype, rounds=message.rounds))

    def process_dataloader(self, dataloader: object) -> object:
        """The client's batches, and those of nobody else."""
        assert isinstance(dataloader, ClientLoaders)
        trainer = self.lightning_module.trainer  # type: ignore[union-attr]
        alone = dataloader.alone(self._client_id, self._num_clients)
        limit = self.limits[f"limit_{self._stage}_batches"]
        return self._evaluator.loader(trainer.lightning_module, self._stage, alone, limit)

    def teardown(self) -> None:
        """Gives the parameters their own storage."""
        self._evaluator.stop()
        if self._binding is not None:
            self._binding.release()
            self._binding = None
        self.give_limits_back(self.lightning_module.trainer)  # type: ignore[union-attr]
        super().teardown()

    # ---- what the evaluation asks of a model: the message's parameters are bound all the time

    @property
    def trained(self) -> Sequence[str] | None:
        """Names of the trained parameters."""
        return None if self._binding is None else self._binding.layout.names

    def show(self) -> None:
        """The parameters of the message are bound."""

    def put_back(self) -> None:
        """They stay."""

    # ---- what the state callback asks of a fit, for checkpoints that nobody writes here

    def states(self) -> Mapping[str, Any]:
        """Nothing."""
        return {}

    def scheduler_states(self) -> list[dict[str, Any]] | None:
        """Nothing."""
        return None

    def finish(self) -> None:
        """There is no fit."""


class _AsFound(EvaluationReport):
    """Says nothing: which values are good, the server knows or guesses, for all clients alike."""

    def oriented(self, record: EvaluationRecord) -> EvaluationRecord:
        """The record."""
        return record

    def log(self, record: EvaluationRecord, trainer: Trainer, callback: Callback) -> None:
        """Nothing."""

    def print_table(self, record: EvaluationRecord, trainer: Trainer) -> None:
        """Nothing."""
