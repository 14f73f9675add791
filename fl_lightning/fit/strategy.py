# SPDX-License-Identifier: Apache-2.0
"""FederatedStrategy: what a Trainer calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from fl_lightning.algorithms import FedAvg
from fl_lightning.algorithms.attacks import Attack
from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.guards.base import Guard
from fl_lightning.arguments import ANY, Bounds, Example, checked
from fl_lightning.clients.base import CohortExecutor, Sequential
from fl_lightning.clients.schedules import load_scheduled_states, scheduled_state
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.data.cohort_samplers import CohortSampler, UniformSampler
from fl_lightning.fit.checks import check_trainer
from fl_lightning.fit.evaluation.evaluator import EvaluationReport
from fl_lightning.fit.fit_lifecycle import FitLifecycle
from fl_lightning.fit.loaders import AttachedData, PartitionLike, PredictionLoader
from fl_lightning.fit.on_ranks import check_same_data
from fl_lightning.fit.options import COHORT, FitOptions
from fl_lightning.fit.readable import ReadableStrategy, remembered
from fl_lightning.fit.state_callback import FederatedState
from fl_lightning.lightning.checkpoint_io import check_resumable
from fl_lightning.lightning.names import TREE, LightningModule, RunningStage, StrategyRegistry, Trainer, TrainerFn


class FederatedStrategy(ReadableStrategy):
    """Turns ``trainer.fit`` into federated training: one epoch is one communication round.

    In each round some clients are sampled. Each of them trains the global model on its own data. The server rule then
    combines their updates into the next global model. One device (CPU, CUDA or MPS) simulates all clients,
    or several processes with a device each share them (``Trainer(devices=..., num_nodes=...)``).

    ``max_epochs`` counts rounds. ``limit_*_batches`` count per client. ``max_steps`` and ``global_step`` count a round
    as the mean number of optimizer steps of a client's visit (:attr:`FitDescription.steps_per_round`), and training
    stops at the end of the round.

    :class:`fl_lightning.FederatedServer` and :class:`fl_lightning.FederatedClient` take the same object. There
    ``executor`` and ``timeout`` have no effect, ``partition`` is refused, and ``on_client_error`` is ``"drop"``.

    Args:
        algorithm: the method; default :class:`fl_lightning.algorithms.FedAvg`. It brings its server half and, if it
            changes local training, its client half.
        client: the client half of another method, to combine with ``algorithm``.
        clients_per_round: clients sampled per round: an int is a count, a float a fraction (rounded up).
        local_epochs: passes over a client's data per round.
        local_steps: optimizer steps per client and round, in place of ``local_epochs``; all take equally many.
        full_gradients: clients do not train locally but send the learning rate times the gradient of all their data
            (FedSGD). Works with every algorithm that does not change local training. Momentum, weight decay, gradient
            clipping and ``limit_train_batches`` have no effect then, and the fit warns of it.
        server_optimizer: factory of the optimizer that applies the server's step, which it takes as its gradient. For
            instance ``functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9)`` (FedAvgM) or one of
            :mod:`fl_lightning.optim`. Default: subtract the step.
        sampler: draws the clients of each round; default uniform without replacement.
        client_optimizer_state: ``"reset"`` gives every client a new optimizer in each round. ``"keep"`` gives it the
            optimizer state of its last round.
        buffers: how BatchNorm statistics and other buffers are combined: ``"mean"`` weights clients by samples,
            ``"global"`` keeps the server's, ``"largest"`` takes those of the client with the most samples: for
            memory banks, whose mean is no bank. Integer buffers are never averaged. Parameters that are not trained and
            have the shape of a trained one (EMA teachers) and non-persistent buffers follow the same policy where
            clients change them.
        fairness_metric: the validation metric whose fairness angle the progress bar shows.
        fairness_mode: whether larger (``"max"``) or smaller (``"min"``) values of ``fairness_metric`` are better, or
            those near 0 (``"abs"``, for gaps with a sign). A mapping says it of several metrics. Where it says nothing,
            logged torchmetrics objects do, and of the rest the names are taken as hints.
        on_client_error: what happens if a client has no data, its training raises, or its update or loss is not finite.
            ``"raise"`` stops with an error that names the client. ``"drop"`` leaves the client out of the round, counts
            and logs it, and warns. Where updates are finite and the step or the model that it leads to would not be,
            the round changes nothing: ``"raise"`` stops with the largest norms, ``"drop"`` warns of them.
        guard: a defence against dishonest clients (:mod:`fl_lightning.guards`), or several, each of which sees what the
            one before has left. They leave clients out of a round, or change updates, before the method sees them.
        attack: what dishonest clients send instead of their updates (:mod:`fl_lightning.attacks`), for robustness runs.
        seed: seed of sampling, shuffling and local randomness. These depend only on (seed, round, client).
        executor: trains the clients of a round (:mod:`fl_lightning.executors`); default one after the other.
        min_clients: fewest usable uploads of a round. A round with fewer changes nothing: not the model, nor what the
            method, the server optimizer and kept client optimizers remember. It is counted and logged, and warns.
        max_failed_rounds: stop with an error after so many rounds in a row in which clients trained and nothing came of
            it, because no upload was usable or the step was not finite. ``None`` never stops.
        strict_resume: refuse to go on from a checkpoint that was written with other arguments of the method, if the
            method remembers anything. ``False`` warns instead. Clients may join, leave, or have other data.
        loss_batch_size: samples per forward pass when a method asks for clients' losses or accuracies; ``"training"``:
            as in training. A larger number is faster, and gives the same values if the loss is a mean over samples. By
            default the clients of the first round look whether it is: if all of them find the same values, small
            batches of later rounds go through the network several at a time.
        log_client_names: log clients' values under their names instead of their numbers, where they have names
            (:class:`fl_lightning.data.ByKey`).
        count_conflicts: whether to count the clients that each step works against (``fed/conflicts``), for which all
            updates of a round have to be there at once; default unless more than 1 GiB of them would be held for that
            alone (docs/logged.md).
        partition: divides the data that the Trainer is given, where a library calls ``Trainer.fit`` itself and nobody
            can wrap its data: a partition or ready index vectors as for :class:`fl_lightning.FederatedDataModule`,
            which does the dividing with this strategy's ``seed``. With more to say, pass a function of the data, such
            as ``functools.partial(fl.FederatedDataModule, partition=fl.data.IID(10), holdout=0.2)``. Leave it out for
            data that is wrapped.
        timeout: with several processes (``Trainer(devices=..., num_nodes=...)``), how long one waits for the others. It
            waits while they train their last clients of a round.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or ``algorithm`` and ``client`` do not fit together.
    """

    strategy_name = "federated"

    @remembered
    @checked(
        algorithm=Example("fl.algorithms.FedLF()"),
        clients_per_round=Bounds(above=0, wording=COHORT),
        local_epochs=Bounds(1, wording="a positive integer (for less than a pass: local_steps or limit_train_batches)"),
        local_steps=Bounds(1),
        server_optimizer=Example("functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9)"),
        sampler=Example("fl.data.UniformSampler()"),
        guard=Example("fl.guards.MultiKrum(dishonest=0.1)"),
        attack=Example("fl.attacks.ZeroUpdates(clients=(3, 7))"),
        executor=Example("fl.executors.Sequential()", "an executor"),
        loss_batch_size=Bounds(1),
        min_clients=Bounds(1),
        max_failed_rounds=Bounds(1),
        partition=ANY,
        timeout=Example("datetime.timedelta(minutes=30)"),
    )
    def __init__(
        self,
        algorithm: ServerRule | None = None,
        client: ClientRule | ServerRule | None = None,
        clients_per_round: int | float = 1.0,
        local_epochs: int = 1,
        local_steps: int | None = None,
        full_gradients: bool = False,
        server_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        sampler: CohortSampler | None = None,
        client_optimizer_state: Literal["reset", "keep"] = "reset",
        buffers: Literal["mean", "global", "largest"] = "mean",
        fairness_metric: str | None = None,
        fairness_mode: Literal["max", "min", "abs"] | Mapping[str, Literal["max", "min", "abs"]] = "max",
        on_client_error: Literal["raise", "drop"] = "raise",
        guard: Guard | list[Guard] | tuple[Guard, ...] | None = None,
        attack: Attack | None = None,
        seed: int = 0,
        executor: CohortExecutor | None = None,
        loss_batch_size: int | Literal["training"] | None = None,
        min_clients: int = 1,
        max_failed_rounds: int | None = 3,
        strict_resume: bool = True,
        log_client_names: bool = False,
        count_conflicts: bool | None = None,
        partition: PartitionLike | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        super().__init__(timeout)
        options = self.options = FitOptions(
            algorithm=FedAvg() if algorithm is None else algorithm, client=client,
            clients_per_round=clients_per_round, local_epochs=local_epochs, local_steps=local_steps,
            full_gradients=full_gradients, server_optimizer=server_optimizer,
            sampler=UniformSampler() if sampler is None else sampler, client_optimizer_state=client_optimizer_state,
            buffers=buffers, fairness_metric=fairness_metric, fairness_mode=fairness_mode,
            on_client_error=on_client_error, guard=guard, attack=attack, seed=seed,
            executor=Sequential() if executor is None else executor, loss_batch_size=loss_batch_size,
            min_clients=min_clients, max_failed_rounds=max_failed_rounds, strict_resume=strict_resume,
            log_client_names=log_client_names, count_conflicts=count_conflicts, partition=partition,
        )  # fmt: skip
        self.algorithm, self.client_rule = options.algorithm, options.client_rule
        self._fits = FitLifecycle(options)
        report = EvaluationReport(fairness_metric, fairness_mode, log_client_names)
        self._state = FederatedState(self._fits, options, report)
        self._data = AttachedData(partition, options.seed)

    # ---- the life of a trainer function

    @property
    def trainer(self) -> Trainer:
        """The trainer that runs this strategy."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes ``Trainer(strategy="federated")`` known."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description="FederatedStrategy with FedAvg")

    def connect(self, model: LightningModule) -> None:
        """Installs the epoch loop and the state callback; runs at the start of every trainer function."""
        super().connect(model)
        trainer = model.trainer
        check_trainer(trainer)
        self._state.attach(self._fits.install(trainer).progress)
        if self._state not in trainer.callbacks:  # type: ignore[attr-defined]
            trainer.callbacks.insert(0, self._state)  # type: ignore[attr-defined]
        self._data.divide(trainer)
        self.take_limits(trainer)

    def setup(self, trainer: Trainer) -> None:
        """Moves the module to its device, makes the optimizers, and binds the parameters."""
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._fits.bind(self.ranks)

    def __repr__(self) -> str:
        # Trainers of another copy of Lightning say that this is none of their strategies, and show it.
        return f"<{type(self).__name__} of {TREE}: for trainers of another copy set FL_LIGHTNING_TREE>"

    def process_dataloader(self, dataloader: object) -> object:
        """Turns the clients' data into what Lightning's loops iterate over."""
        trainer = self.trainer
        if trainer.state.stage == RunningStage.TRAINING:
            return self._fits.training_loader(dataloader, self.limits["limit_train_batches"], self._state.loaded)
        name = "test" if trainer.testing else "val"
        if not isinstance(dataloader, ClientLoaders):
            setattr(trainer, f"limit_{name}_batches", self.limits[f"limit_{name}_batches"])  # Lightning applies it
            return dataloader
        limit = self.limits[f"limit_{name}_batches"]
        if trainer.predicting:
            return PredictionLoader(dataloader, limit)
        if self.ranks is not None:
            check_same_data(self.ranks, name, dataloader.fingerprint())
        return self._state.loader(trainer.lightning_module, name, dataloader, limit)

    def on_exception(self, exception: BaseException) -> None:
        """Puts the global weights back into the module, in training mode, after any error."""
        self.abandon(exception)
        self._state.stop()
        self._fits.abort()
        super().on_exception(exception)

    def teardown(self) -> None:
        """Gives the parameters their own storage and restores the trainer's limits."""
        self._state.stop()
        self._fits.close(self.trainer.interrupted)
        self._data.restore()
        self.restore_limits(self.trainer)
        super().teardown()

    # ---- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The global model as validation evaluates it, even if the module holds a client's parameters at the moment."""
        if not self._fits.is_bound:
            return super().lightning_module_state_dict()
        with self._fits.showing():
            state, start = super().lightning_module_state_dict(), self._fits.start
            return state if start is None else start.with_buffers(state)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Client optimizers are not part of the global state; their scheduled options (learning rate) are."""
        return scheduled_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the scheduled options.

        Raises:
            ValueError: the checkpoint has other optimizers.
        """
        load_scheduled_states(self.optimizers, checkpoint["optimizer_states"])

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint. A fit can resume only from the checkpoint of a federated fit.

        Raises:
            ValueError: the file is damaged, of another fit, or holds weights that are not finite.
        """
        options = {} if weights_only is None else {"weights_only": weights_only}  # Lightning 2.5 does not know it
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, **options)
        if self.trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        check_resumable(checkpoint, checkpoint_path)
        return checkpoint

    # ---- local steps on Lightning's full path

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's training step, with the client rule's term added to its loss."""
        hooks, step = self._fits.hooks, super().training_step
        return step(*args, **kwargs) if hooks is None else hooks.training_step(step, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Lets the client rule correct gradients after the backward pass, before clipping and stepping."""
        hooks = self._fits.hooks
        closure = closure if hooks is None else hooks.corrected(closure, self.precision_plugin)
        return super().optimizer_step(optimizer, closure, model, **kwargs)


FederatedStrategy.register_strategies(StrategyRegistry)
