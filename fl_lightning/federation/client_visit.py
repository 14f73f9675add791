# SPDX-License-Identifier: Apache-2.0
"""One trainer function of a client elsewhere: its training in one round, its loss, or its evaluation; and no server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.algorithms.records import Federation
from fl_lightning.arguments import trusted
from fl_lightning.clients.base import Sequential
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.buffers import BufferBank
from fl_lightning.clients.update_rows import Upload
from fl_lightning.core.modules import state_on_cpu
from fl_lightning.core.records import EvaluationRecord
from fl_lightning.core.storage import rule_state
from fl_lightning.data.client_loaders import ClientLoaders, VisitLoader
from fl_lightning.federation.messages import ClientMessage, ServerMessage, answer_of, federation_mean_visit
from fl_lightning.federation.module_changes import ModuleAtClient
from fl_lightning.fit.checks import check_trainer, check_visit_schedulers, refuse_steps_by_hand
from fl_lightning.fit.client_side import ClientSide
from fl_lightning.fit.evaluation.one_client import PersonalEvaluation
from fl_lightning.fit.loaders import RoundLoader, local_batches
from fl_lightning.fit.options import FitOptions
from fl_lightning.fit.state_callback import FederatedState
from fl_lightning.fit.uploads import merge_module_changes
from fl_lightning.lightning.batches import ClientTask
from fl_lightning.lightning.epoch_loop import install
from fl_lightning.lightning.names import LightningModule, RunningStage, Trainer
from fl_lightning.lightning.optimizers import configured_optimizers
from fl_lightning.lightning.round_clock import MeanVisit
from fl_lightning.lightning.single_device import OneDevice

Work = Literal["train", "loss", "val", "test"]


class VisitStrategy(OneDevice):
    """Turns a trainer function into what one client does for one message: it trains, measures its loss, or evaluates.

    ``num_clients`` is ``None`` where the data have all registered clients. ``before`` is what :attr:`state_after` was
    after the client's last visit that counted. Afterwards ``sent`` is what the client sends, ``state_after`` what it
    keeps if the round counts, and ``loss`` what was measured.
    """

    def __init__(
        self,
        options: FitOptions,
        client_id: int,
        num_clients: int | None,
        message: ServerMessage,
        before: Mapping[str, Any] | None,
        module: ModuleAtClient,
        work: Work,
    ) -> None:
        super().__init__()
        self._options, self._message, self._before, self._work = options, message, before, work
        self._client_id, self._num_clients, self._module = client_id, num_clients, module
        self._binding: BoundParameters | None = None
        self._upload: Upload | None = None
        self.sent: ClientMessage | None = None
        self.state_after: dict[str, Any] = {}
        self.loss = float("nan")
        self._knows_clock = True
        # Which values are good, the server knows or guesses, for all clients alike.
        self._state = FederatedState(self, options, report=None)

    # ---- the life of a trainer function

    def connect(self, model: LightningModule) -> None:
        """Puts the epoch loop, which asks this object for its round, into the trainer."""
        super().connect(model)
        trainer = self._trainer = model.trainer
        check_trainer(trainer)
        self._loop = install(trainer, self)
        self._loop.progress.begin_at(self._message.round)
        self._state.attach(self._loop.progress)
        trainer.callbacks.insert(0, self._state)  # type: ignore[attr-defined]
        self.take_limits(trainer)

    def setup(self, trainer: Trainer) -> None:
        """Moves the module to its device, makes the optimizers, and binds the parameters."""
        super().setup(trainer)
        module = trainer.lightning_module
        optimizers = trainer.optimizers if self._work in ("train", "loss") else configured_optimizers(module)
        self._binding = BoundParameters(module, self._options.algorithm.layers, optimizers)
        self._loop.forget_data()

    def process_dataloader(self, dataloader: object) -> object:
        """Turns the client's data into a round, or into batches to evaluate, and takes the message."""
        assert isinstance(dataloader, ClientLoaders)
        dataloader = dataloader.loaders if isinstance(dataloader, VisitLoader) else dataloader
        trainer, client = self._trainer, self._client_id
        if trainer.state.stage == RunningStage.TRAINING:
            if self._num_clients is not None:  # these are the client's own data
                dataloader = dataloader.numbered_from(client)
            self._set_clock(*self._mean_visits(dataloader, self.limits["limit_train_batches"]))
            self._loaders = dataloader
            return RoundLoader(1, dataloader, self._loop)
        assert self._binding is not None
        alone = dataloader.alone(client, self._num_clients)
        buffers = BufferBank(trainer.lightning_module, self._options.buffers, self._binding.layout.names)
        self._take_message(self._binding, buffers, self._num_clients or len(dataloader))
        self._module.take()
        limit = self.limits[f"limit_{self._work}_batches"]
        return self._state.loader(trainer.lightning_module, self._work, alone, limit)

    def teardown(self) -> None:
        """Gives the parameters storage of their own: the global parameters that the client received."""
        self._state.stop()
        if self._binding is not None:
            self._binding.release()
        self._binding = None
        self.restore_limits(self._trainer)
        super().teardown()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's training step, with the client rule's term added to its loss."""
        return self.side.runner.hooks.training_step(super().training_step, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Lets the client rule correct gradients after the backward pass, before clipping and stepping."""
        closure = self.side.runner.hooks.corrected(closure, self.precision_plugin)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    # ---- the message

    def own_state(self, module: LightningModule, num_clients: int) -> dict[str, Tensor]:
        """The module's state with the message's parameters, or the client's own; without a trainer function."""
        options, device = self._options, module.device
        binding = BoundParameters(module, options.algorithm.layers, configured_optimizers(module))
        names = binding.layout.names
        try:
            self._take_message(binding, BufferBank(module, options.buffers, names), num_clients)
            self._module.take()
            model_of = options.client_rule.personal_model
            own = PersonalEvaluation(module, device, model_of, options.algorithm.layers, names)
            with own.standing_in(self._client_id) or nullcontext():
                return state_on_cpu(module)
        finally:
            binding.release()

    def _take_message(self, binding: BoundParameters, buffers: BufferBank, num_clients: int) -> None:
        message, rule, theta, client = self._message, self._options.client_rule, binding.theta, self._client_id
        message.check_params(theta)
        theta.copy_(message.params)
        if message.buffers:
            buffers.put(message.buffers)
        try:
            rule_state.load_broadcast(rule, message.broadcast)
            rule_state.load_client_state(rule, client, message.client_state)
        except (AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
            raise ValueError(f"broadcast and client_state must be those of {type(rule).__name__}: {error}") from error
        if self._before is not None and self._before["rule"]:
            rule_state.set_local_state(rule, client, self._before["rule"], self._before["round"])
        federation = trusted(Federation)
        rule.begin_fit(federation(num_clients, binding.layout, theta.device, theta.dtype, rounds=message.rounds))

    def begin_fit(self) -> VisitStrategy:
        """Takes everything that the server and the client's last visit have left."""
        trainer, loop, options = self._trainer, self._loop, self._options
        limit, loaders = self.limits["limit_train_batches"], self._loaders
        batches = local_batches(trainer, options, limit, loaders)
        assert self._binding is not None
        binding = self._binding = self._binding.renewed(options.algorithm.layers, trainer.optimizers)
        side = self.side = ClientSide(trainer, loop, options, limit, binding, batches, 1, Sequential())
        side.runner.isolation.warned = self._module.warned
        side.runner.losses.factor = self._message.loss_batch_factor
        self._take_message(binding, side.buffers, self._num_clients or len(loaders))
        if self._before is not None and self._before["optimizers"]:
            side.runner.optimizers.load_state_dict({self._client_id: self._before["optimizers"]})
        self._catch_up()
        return self

    def _catch_up(self) -> None:
        """Moves schedulers, which begin anew, to the round."""
        trainer, schedules, index = self._trainer, self.side.schedules, self._message.round
        check_visit_schedulers(trainer, self._knows_clock, index * schedules.steps)
        if trainer.lr_scheduler_configs:
            schedules.begin_round()
            self._loop.pass_rounds(index)

    def _mean_visits(self, loaders: ClientLoaders, limit: int | float) -> tuple[MeanVisit, MeanVisit | None]:
        options, full = self._options, self._options.needs.full_gradients
        own = local_batches(self._trainer, options, limit, loaders).mean_visit(full)
        return own, federation_mean_visit(self._message, own, self._num_clients is None, options.local_epochs, full)

    def visit_batches(self, loaders: ClientLoaders) -> int:
        """How long a loader of all clients' data seems to be."""
        mean_visit = self._mean_visits(loaders, 1.0)[1]
        if mean_visit is None or (self._num_clients is not None and self.limits["limit_train_batches"] != 1.0):
            raise ValueError(
                "len(train_dataloader) depends on the whole federation: the server must send steps_per_round in "
                f"ServerMessage, and limit_train_batches be 1.0, found {self.limits['limit_train_batches']}"
            )
        return mean_visit.batches

    def _set_clock(self, own: MeanVisit, mean_visit: MeanVisit | None) -> None:
        clock, self._knows_clock = self._loop.clock, mean_visit is not None
        clock.mean_visit = mean_visit or own
        lacking = [] if self._knows_clock else ["steps_per_round"]
        lacking += ["rounds"] if self._message.rounds is None else []
        if lacking:
            clock.endless = (
                "estimated_stepping_batches depends on the whole federation: the server must send "
                f"{' and '.join(lacking)} in ServerMessage"
            )

    # ---- the round, as the epoch loop asks for it

    def open_round(self) -> Iterator[ClientTask]:
        """Yields the client, or an empty place."""
        assert self._binding is not None
        self._binding.check(self._trainer.optimizers, lambda: self.side.runner.isolation.take_snapshot().tensors)
        client, index, loaders = self._client_id, self._message.round, self.side.loaders
        size = len(loaders.indices(client))
        if size == 0:
            raise ValueError(f"client {client} must have training data, found none")
        trains = self._work == "train"
        tasks = [ClientTask(client, 0, index, size, loaders.num_batches(client))] if trains else []
        self.side.begin_round(tasks)
        yield from tasks or [ClientTask(None, 0, index)]

    def train_client(self, task: ClientTask) -> Tensor | None:
        """Trains the client."""
        self._upload = self.side.train(task)
        refuse_steps_by_hand(self._trainer, self._upload.step_counts.by_hand, self._upload.hand_set)
        self.side.schedules.arrived(self._client_id, self._upload.step_counts)
        return self._upload.train_loss

    def close_round(self) -> None:
        """Takes what the client leaves behind, and moves schedulers and clock to the round's end."""
        assert self._binding is not None
        side, uploads = self.side, [] if self._upload is None else [self._upload]
        side.end_round()
        counted = [upload.client_id for upload in uploads]
        merge_module_changes(side.runner.isolation, uploads, counted)
        if self._work == "loss":
            self.loss = float(side.losses_at(self._message.round, self._binding.theta, [self._client_id])[0])
        side.schedules.close_round(counted)

    def end_epoch(self) -> None:
        """Refuses rates that hooks of the epoch's end have set: the next round has another trainer."""
        refuse_steps_by_hand(self._trainer, (), self.side.schedules.set_by_hand())

    def publish_round(self) -> None:
        """The learning-rate schedulers have stepped: packs what the client keeps."""
        self._trainer.should_stop = True  # max_epochs is that of the federation
        upload = self._upload
        if upload is None:
            return
        own = {"rule": upload.report.local_state, "round": self._message.round}
        if not upload.report.local_state and self._before is not None:  # what it had stays
            own = {name: self._before[name] for name in ("rule", "round")}
        self.state_after = {**own, "optimizers": self.side.runner.optimizers.pop_pending(self._client_id)}

    # ---- what the evaluator asks of a model: the message's parameters are bound all the time

    @property
    def record(self) -> EvaluationRecord | None:
        """What an evaluation has found; ``None`` if the client has no data of the stage."""
        return self._state.record

    @property
    def trained(self) -> Sequence[str] | None:
        """Names of the trained parameters."""
        return None if self._binding is None else self._binding.layout.names

    def show(self) -> None:
        """The parameters of the message are bound."""

    def restore(self) -> None:
        """They stay."""

    # ---- what the state callback asks of a fit

    def begin_round(self) -> None:
        """The hooks before the first round have run: the module takes what rounds have left."""
        self._module.take()

    def finish(self) -> None:
        """The round is over, and so are the module's hooks: packs what the client sends."""
        if self._upload is not None:
            upload, side, index = self._upload, self.side, self._message.round
            update, buffers = side.runner.rows.update(0), side.buffers.values_in(upload.buffers)
            module = self._module.change(self._options.client_rule.withholds)
            self.sent = answer_of(upload, index, update, buffers, module)

    start = None  # nobody writes checkpoints here

    def states(self) -> Mapping[str, Any]:
        """Nothing."""
        return {}
