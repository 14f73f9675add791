# SPDX-License-Identifier: Apache-2.0
"""Lightning's training epoch loop with a client in place of a batch: one epoch is one communication round."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from fl_lightning.lightning.batches import ClientTask
from fl_lightning.lightning.fast_log import FastLog
from fl_lightning.lightning.loop_parts import (
    GroupedOptimization,
    StepValues,
    check_contract,
    count_visits,
    install_results,
)
from fl_lightning.lightning.names import Trainer, TrainerFn, lightning_module
from fl_lightning.lightning.round_clock import RoundClock, RoundProgress

if TYPE_CHECKING:
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.trainer import call
else:
    _TrainingEpochLoop = lightning_module("loops.training_epoch_loop")._TrainingEpochLoop
    call = lightning_module("trainer.call")


class FitHost(Protocol):
    """What the loops ask before there are rounds."""

    def begin_fit(self) -> RoundConductor:
        """Data and optimizers are there, and a checkpoint is loaded."""

    def visit_batches(self, loaders: Any) -> int:
        """Batches of a client's visit, by the loaders of all clients: mean over these, rounded up, without limits."""


class RoundConductor(Protocol):
    """What the loops ask of a fit."""

    def open_round(self) -> Iterator[ClientTask]:
        """Draws the clients of the current epoch."""

    def train_client(self, task: ClientTask) -> Tensor | None:
        """Trains one client and returns its mean loss, or None if it was dropped."""

    def close_round(self) -> None:
        """Aggregates and applies the server step; called once per round, before validation."""

    def publish_round(self) -> None:
        """Logs the round that was closed."""

    def end_epoch(self) -> None:
        """All hooks of the epoch's end have run."""


class FederatedEpochLoop(_TrainingEpochLoop):
    """Runs the clients of a round, then the server step, then validation.

    Callbacks live on the server: their ``on_train_batch_*`` hooks run once per client, with the global weights in the
    module. Module hooks live on the client: they run once per local batch.
    """

    conductor: RoundConductor

    def __init__(self, trainer: Trainer, host: FitHost, replaced: _TrainingEpochLoop) -> None:
        super().__init__(trainer, min_steps=replaced.min_steps, max_steps=replaced.max_steps)
        # The old validation loop already knows its data source.
        self.val_loop = replaced.val_loop
        self.host = host
        self.progress = RoundProgress(trainer)
        self.clock = RoundClock(self)
        self.automatic_optimization = GroupedOptimization(trainer, self.clock)
        self._step_values = StepValues(trainer)

    # ---- the round

    def begin_fit(self) -> None:
        """Data and optimizers are there, and a checkpoint is loaded."""
        self.conductor = self.host.begin_fit()

    @property
    def done(self) -> bool:
        """A round ends when all its clients are done: stop requests wait for that.

        One that a checkpoint left unfinished has clients that are done, and is yet to end. Lightning would take a
        validation of an earlier fit of this trainer for this round's, end it at once, and never train again.
        """
        over = self._num_ready_batches_reached() and not self.restarting
        if self.trainer.should_stop and not over:
            _ = super().done  # says so where min_epochs or min_steps forbid to stop
        return over

    def advance(self, data_fetcher: Any) -> None:
        """Trains one client; after the last one, takes the server step."""
        if self.restarting:
            # The checkpoint was taken after this round's server step: validation or the end of the epoch is left.
            self._skip_next_val = self.progress.validated
            if not self._skip_next_val:
                self.val_loop.batch_progress.total.reset()
            self.val_loop.restarting = False
            # Or Lightning would leave out plateau schedulers at the end of this epoch; their metrics are there.
            self.trainer.fit_loop._restarting = False
            return
        self.val_loop.restarting = False
        trainer, connector = self.trainer, self.trainer._logger_connector
        task, _, _ = next(data_fetcher)
        index = self.batch_idx + 1  # which counts batches that are ready, and this one is not yet
        self.batch_progress.is_last_batch = data_fetcher.done
        self.batch_progress.increment_ready()
        connector.on_batch_start(task)
        if task.client_id is None:  # a place that nobody takes: Lightning wants equally many batches in every epoch
            self.batch_progress.increment_started()
            self.batch_progress.increment_processed()
        else:
            # What callbacks log here counts as much as the client has samples, not as its last local batch.
            self.expect(task, task.num_samples)
            with self.clock.counting_clients():
                call._call_callback_hooks(trainer, "on_train_batch_start", task, index)
            self.batch_progress.increment_started()
            with trainer.profiler.profile("run_training_batch"):
                loss = self.conductor.train_client(task)
            self.batch_progress.increment_processed()
            outputs = {} if loss is None else {"loss": loss}
            self.expect(task, task.num_samples)
            with self.clock.counting_clients():
                call._call_callback_hooks(trainer, "on_train_batch_end", outputs, task, index)
        connector.on_batch_end()
        self.batch_progress.increment_completed()
        if self._num_ready_batches_reached():
            self.conductor.close_round()
            self.progress.close_round()
            self.conductor.publish_round()
            self._step_values.warn(self._results)
        if task.client_id is not None:
            connector.update_train_step_metrics()

    def pass_rounds(self, count: int) -> None:
        """Moves schedulers that begin anew through the rounds before round ``count``, in which others have trained."""
        assert self.clock.mean_visit is not None
        steps = self.clock.mean_visit.steps
        for index in range(count):
            self.progress.begin_at(index)
            self.clock.begin_round(steps, steps)
            self.clock.close_round(steps)
            self.clock.step_schedulers("epoch")
        self.progress.begin_at(count)

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        # Lightning validates at once when somebody asks it to stop. A round has no new model before its server step.
        if not self._num_ready_batches_reached():
            return False
        trainer = self.trainer
        if trainer.check_val_every_n_epoch is not None:
            return bool(super()._should_check_val_fx(data_fetcher))
        # Every n steps, wherever epochs begin: after the round in which the n-th is taken.
        every = int(trainer.val_check_interval)
        passed = self.global_step // every > self.progress.steps_before // every
        return bool(trainer.enable_validation and (passed or trainer.should_stop))

    def _num_ready_batches_reached(self) -> bool:
        # Not trainer.num_training_batches, which are a client's.
        done = self.batch_progress.current.ready == self.clock.places
        return bool(done or self.batch_progress.is_last_batch)

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Steps schedulers; Lightning does so last of all in an epoch, before it looks whether to stop."""
        super().update_lr_schedulers(interval, update_plateau_schedulers)
        if interval == "epoch" and update_plateau_schedulers:
            self.conductor.end_epoch()

    def _should_accumulate(self) -> bool:
        return not self.clock.ends_group

    # ---- one local batch through Lightning's own optimization

    def local_step(self, batch: Any, batch_idx: int, num_samples: int) -> tuple[Tensor | None, bool]:
        """Runs every hook that Lightning runs for a batch.

        Returns the detached loss (``None`` if the step gave none), and whether ``on_train_batch_start`` asked to stop.
        """
        trainer, module = self.trainer, self.trainer.lightning_module
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        self.expect(batch, num_samples)
        if call._call_lightning_module_hook(trainer, "on_train_batch_start", batch, batch_idx) == -1:
            return None, True
        kwargs = self._build_kwargs(OrderedDict(), batch, batch_idx)
        if module.automatic_optimization:
            # Lightning refuses more than one optimizer here.
            outputs: Any = self.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs)
            if self.clock.ends_group and self.clock.scheduled:
                self.clock.end_step()
        else:
            outputs = self.manual_optimization.run(kwargs)
        self.clock.end_batch()
        call._call_lightning_module_hook(trainer, "on_train_batch_end", outputs, batch, batch_idx)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor):
            return None, False
        window = trainer.accumulate_grad_batches if module.automatic_optimization else 1
        return loss.detach() if window == 1 else loss.detach() * window, False  # Lightning has divided it

    def expect(self, batch: Any, num_samples: int | None) -> None:
        """Tells ``self.log`` how much the next values weigh."""
        connector = self.trainer._logger_connector
        if connector._current_fx is not None and connector._first_loop_iter:
            # Only the first batch of a round may reset what was logged before.
            connector._first_loop_iter = False
        self._results.batch = batch
        self._results.batch_size = num_samples

    def count_step(self) -> None:
        """Counts an optimizer step that was taken outside Lightning's optimization loop."""
        # As increment_by of both does, whose calls take as long as a small operation.
        progress = self.automatic_optimization.optim_progress.optimizer
        for tracker in (progress.step.total, progress.step.current):
            tracker.ready += 1
            tracker.completed += 1
        for tracker in (progress.zero_grad.total, progress.zero_grad.current):
            tracker.ready += 1
            tracker.started += 1  # type: ignore[attr-defined]  # its class says less than it is
            tracker.completed += 1

    # ---- what local training asks for

    @property
    def batch_size(self) -> int | None:
        """Samples of the batch in training."""
        return self._results.batch_size

    def fast_log(self) -> FastLog:
        """``self.log`` for local training, into this loop's results."""
        return FastLog(self.trainer.lightning_module, self._results)

    def leave_validation(self) -> None:
        """Ends a validation that was interrupted: the submodules are in training mode again where they were before."""
        if self.trainer.validating or self.trainer.sanity_checking:
            self.val_loop._on_evaluation_model_train()

    def forget_data(self) -> None:
        """Lets Lightning ask for the training data again if it was read before the fit was set up."""
        self.clock.shown_loader = self.trainer.train_dataloader
        self.trainer.fit_loop._combined_loader = None

    # ---- logging beside self.log

    def publish(self, metrics: Mapping[str, float], bar: Mapping[str, float | str]) -> None:
        """Makes numbers available to loggers, monitors (``callback_metrics``) and progress bars."""
        connector = self.trainer._logger_connector
        if metrics:
            connector._callback_metrics.update({name: Tensor([value]).squeeze(0) for name, value in metrics.items()})
            connector.log_metrics(dict(metrics))
        connector._progress_bar_metrics.update(bar)

    # ---- resuming

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Lightning's counters, and where in the round they were taken."""
        return {**super().on_save_checkpoint(), "federated": self.progress.state_dict()}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`on_save_checkpoint` returned."""
        super().on_load_checkpoint(state_dict)
        self.progress.load_state_dict(state_dict["federated"])

    def reset(self) -> None:
        """Starts a round from zero, or keeps the counters of the one being finished."""
        if self.restarting:
            self.batch_progress.reset_on_restart()
            self.scheduler_progress.reset_on_restart()
            self.automatic_optimization.optim_progress.reset_on_restart()
            return
        super().reset()


def install(trainer: Trainer, host: FitHost) -> FederatedEpochLoop:
    """Puts a :class:`FederatedEpochLoop` into the trainer, once."""
    check_contract(trainer)
    current = trainer.fit_loop.epoch_loop
    if isinstance(current, FederatedEpochLoop) and current.host is host:
        return current
    loop = FederatedEpochLoop(trainer, host, current)
    trainer.fit_loop.epoch_loop = loop
    install_results(trainer)
    count_visits(trainer)
    return loop


def running_host(trainer: Trainer) -> FitHost | None:
    """The host of the federated fit that this trainer runs at the moment; ``None`` without one."""
    loop, state = trainer.fit_loop.epoch_loop, trainer.state
    runs = isinstance(loop, FederatedEpochLoop) and state.fn == TrainerFn.FITTING and state.status == "running"
    return loop.host if runs else None
