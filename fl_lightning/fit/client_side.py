# SPDX-License-Identifier: Apache-2.0
"""The clients' side of a fit: a module in which clients can train, whoever opens their rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.records import Needs
from fl_lightning.clients.base import CohortExecutor, CohortRunner, SequentialRunner
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.buffers import BufferBank
from fl_lightning.clients.client_batches import ClientBatches
from fl_lightning.clients.client_runner import ClientRunner
from fl_lightning.clients.update_rows import Upload
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.fit.checks import check_accumulation, check_module, check_schedulers, warn_of_unused_settings
from fl_lightning.fit.options import FitOptions
from fl_lightning.lightning.batches import ClientTask
from fl_lightning.lightning.epoch_loop import FederatedEpochLoop
from fl_lightning.lightning.inspection import users_callback
from fl_lightning.lightning.names import Trainer, callbacks, rank_zero_info, rank_zero_warn
from fl_lightning.lightning.optimizers import client_learning_rate

_LOSSES = Needs(losses=True)


class ClientSide:
    """Trains the clients of rounds and hands over their uploads; knows no server.

    It is made once the optimizers exist and the module is on its device. ``limit`` is the trainer's
    ``limit_train_batches``, ``capacity`` the largest number of clients in a round, ``rule`` the client rule, if not the
    options' own object. Raises ValueError where the module, the optimizers or the data lack what the method needs.
    """

    def __init__(
        self,
        trainer: Trainer,
        loop: FederatedEpochLoop,
        options: FitOptions,
        limit: int | float,
        binding: BoundParameters,
        batches: ClientBatches,
        capacity: int,
        executor: CohortExecutor,
        rule: ClientRule | None = None,
    ) -> None:
        self._trainer, self._options, self._binding = trainer, options, binding
        self.needs = options.needs
        check_schedulers(trainer)
        self._check_module()
        warn_of_unused_settings(trainer, options.method, limit)
        _warn_of_batch_hooks(trainer)
        self.buffers = BufferBank(trainer.lightning_module, options.buffers, binding.layout.names)
        self.runner = ClientRunner(
            trainer, loop, rule or options.client_rule, binding, options, self.needs, batches,
            executor.update_rows(binding, capacity), self.buffers,
        )  # fmt: skip
        self.schedules = self.runner.schedules
        name = type(trainer.lightning_module).__name__
        for words in self.runner.isolation.unfollowed():
            rank_zero_info(f"{name} passes something on from one client of a round to the next: {words}")
        for words in self.runner.isolation.not_joined():
            rank_zero_info(f"{name} has a metric to which clients cannot add together: {words}")
        self._cohort_runner = self._make_cohort_runner(executor)
        self._notice: str | None = None  # empty once it was given

    def _check_module(self) -> None:
        trainer, options = self._trainer, self._options
        client_lr, _ = client_learning_rate(trainer.optimizers)
        check_module(trainer.lightning_module, options.method, self._binding.layout, trainer.optimizers, client_lr)

    def _make_cohort_runner(self, executor: CohortExecutor) -> CohortRunner:
        obstacle = executor.obstacle(self.runner)
        runner = executor.runner(self.runner) if obstacle is None else SequentialRunner(self.runner, obstacle)
        if runner.fallback is not None:
            rank_zero_info(
                f"{type(executor).__name__} trains this fit's clients one after the other: {runner.fallback}"
            )
        return runner

    @property
    def fallback(self) -> str | None:
        """Why clients train one after the other although another executor was asked for, or ``None``."""
        return self._cohort_runner.fallback

    @property
    def loaders(self) -> ClientLoaders:
        """The clients' training data."""
        return self.runner.batches.loaders

    # ---- a round

    def begin_round(self, tasks: Sequence[ClientTask]) -> None:
        """A round of these clients begins, from the module's present buffers and the optimizers' present options."""
        self.follow_optimizers()
        check_accumulation(self._trainer, self.runner.batches.window)
        self.runner.begin_round()
        self._cohort_runner.begin_round(tasks)

    def train(self, task: ClientTask) -> Upload:
        """Trains the next client of the round; the module holds the global model before it, and afterwards."""
        try:
            upload = self._cohort_runner.train(task)
            self._note_skipped(upload)
            return upload
        finally:
            self.runner.restore()

    def _note_skipped(self, upload: Upload) -> None:
        """Notes the fit's first client with batches that trained nothing; a warning now could pass for its error."""
        if upload.skipped == 0 or self._notice is not None:
            return
        kind = type(self._trainer.lightning_module).__name__
        self._notice = (
            f"{upload.skipped} of {upload.step_counts.batches} batches of client {upload.client_id} trained nothing, "
            f"because {kind}.training_step returned None, or collate_fn in place of a batch: return the loss, or "
            "ignore this if such batches are left out on purpose"
        )

    def follow_optimizers(self) -> None:
        """Uses the trainer's present optimizers from now on, if they were replaced since the last client."""
        if self.runner.optimizers.follow():
            self.runner.take_optimizers()
            self._check_module()

    def losses_at(self, round: int, params: Tensor, clients: Sequence[int]) -> Tensor:  # noqa: A002
        """Losses of clients at other parameters ``[n]``, as they were measured in this round: float64 on the CPU."""
        self._binding.bind_flat(params.detach().to(self._binding.theta.dtype).contiguous())
        try:
            losses = self._cohort_runner.losses(clients, lambda c: self.runner.measure(c, round, _LOSSES)["loss"])
            return torch.tensor(losses, dtype=torch.float64)
        finally:
            self._binding.bind_global()

    def end_round(self) -> None:
        """All clients of the round were trained; raises what :meth:`ClientRunner.check_round` raises."""
        self._cohort_runner.end_round()
        self.runner.optimizers.restore()
        self.runner.check_round()
        if self._notice:
            rank_zero_warn(self._notice)
            self._notice = ""

    def close(self) -> None:
        """The fit is over, however it ended."""
        self._cohort_runner.close()


def _warn_of_batch_hooks(trainer: Trainer) -> None:
    """Names callbacks whose hooks around batches do not run for every batch, as an EMA or a warm-up would need."""
    hooks, bar = ("on_train_batch_start", "on_train_batch_end"), callbacks.ProgressBar
    own = [c for c in trainer.callbacks if users_callback([c], *hooks) and not isinstance(c, bar)]  # type: ignore[attr-defined]
    if own:
        names = ", ".join(dict.fromkeys(type(callback).__name__ for callback in own))
        rank_zero_warn(
            f"{' and '.join(hooks)} of {names} are called once per client and round, not once per batch, because "
            "callbacks run on the server: put what every local step needs into the module's hooks of these names"
        )
