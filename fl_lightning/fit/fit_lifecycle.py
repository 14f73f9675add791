# SPDX-License-Identifier: Apache-2.0
"""The fits of one strategy: the running one, and what the next one goes on from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from fl_lightning.clients.base import AddingUp, Sequential
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.client_batches import ClientBatches
from fl_lightning.clients.local_training import ClientHooks
from fl_lightning.core.layout import names_in
from fl_lightning.core.records import RoundRecord
from fl_lightning.data.client_loaders import ClientLoaders, VisitLoader
from fl_lightning.data.cohort_samplers import cohort_size
from fl_lightning.fit import on_ranks
from fl_lightning.fit.client_side import ClientSide
from fl_lightning.fit.fit import FederatedFit
from fl_lightning.fit.loaders import RoundLoader, local_batches, refuse_undivided_data
from fl_lightning.fit.options import FitOptions
from fl_lightning.fit.state_callback import RoundStart
from fl_lightning.lightning.epoch_loop import FederatedEpochLoop, install
from fl_lightning.lightning.fit_description import FitDescription
from fl_lightning.lightning.names import Trainer
from fl_lightning.lightning.ranks import Ranks


class FitLifecycle:
    """Binds the module for a fit, begins and ends the fit, and keeps the method's state between fits."""

    _begin: Callable[[], FederatedFit]  # with the data that Lightning has asked for

    def __init__(self, options: FitOptions) -> None:
        self._options = options
        self._binding: BoundParameters | None = None
        self._fit: FederatedFit | None = None
        self._ranks: Ranks | None = None
        self._last_round: RoundRecord | None = None
        self._fallback: str | None = None
        self._carried: dict[str, Any] | None = None
        self.memory: Mapping[str, int] = {}  # what the running or last fit allocates beside the module, in bytes

    def install(self, trainer: Trainer) -> FederatedEpochLoop:
        """Puts the epoch loop, which asks this object for a fit, into the trainer."""
        self._trainer = trainer
        self.loop = install(trainer, self)
        return self.loop

    def bind(self, ranks: Ranks | None) -> None:
        """A fit is set up: binds the parameters of the trainer's module."""
        self._ranks = ranks
        if ranks is not None:
            on_ranks.check_executor(ranks, self._options.executor)
        module = self._trainer.lightning_module
        self._binding = BoundParameters(module, self._options.algorithm.layers, self._trainer.optimizers)
        self.loop.forget_data()

    @property
    def is_bound(self) -> bool:
        """Whether the module's parameters are bound: from the setup of a fit to its teardown."""
        return self._binding is not None

    @property
    def hooks(self) -> ClientHooks | None:
        """What the client rule does inside local steps; ``None`` outside a fit."""
        return None if self._fit is None else self._fit.clients.runner.hooks

    @property
    def description(self) -> FitDescription | None:
        """The running or last fit in plain values; ``None`` before the first."""
        if self._fit is not None:
            return self._fit.description
        return None if self._carried is None else FitDescription.from_state_dict(self._carried["fit"])

    @property
    def trained(self) -> Sequence[str] | None:
        """Names of the trained parameters of the running or last fit; ``None`` before the first."""
        return None if self.description is None else names_in(self.description.layout)

    @property
    def last_round(self) -> RoundRecord | None:
        """What the last finished round did."""
        return self._last_round if self._fit is None else self._fit.last_round or self._last_round

    @property
    def executor_fallback(self) -> str | None:
        """Why the running or last fit trains clients one after the other although asked for something else."""
        return self._fallback if self._fit is None else self._fit.clients.fallback

    # ---- data

    def training_loader(self, dataloader: object, limit: int | float, loaded: dict[str, Any] | None) -> RoundLoader:
        """Takes the clients' data for the fit that is about to begin, or data loaded anew."""
        if not isinstance(dataloader, ClientLoaders):
            refuse_undivided_data(dataloader)
        dataloader = dataloader.loaders if isinstance(dataloader, VisitLoader) else dataloader
        size = cohort_size(self._options.clients_per_round, len(dataloader))
        if self._fit is not None:  # it keeps its clock
            self._fit.reload(dataloader)
        else:
            batches = local_batches(self._trainer, self._options, limit, dataloader)
            self.loop.clock.mean_visit = batches.mean_visit(self._options.needs.full_gradients)
            self._begin = partial(self._begun, batches, size, limit, loaded)
        return RoundLoader(size, dataloader, self.loop)

    def begin_fit(self) -> FederatedFit:
        """Data and optimizers are there, and a checkpoint is loaded."""
        return self._begin()

    def _begun(
        self, batches: ClientBatches, capacity: int, limit: int | float, loaded: dict[str, Any] | None
    ) -> FederatedFit:
        assert self._binding is not None
        options, loaders, agreement = self._options, batches.loaders, None
        self._binding = self._binding.renewed(options.algorithm.layers, self._trainer.optimizers)
        self._binding.check_finite()
        self.loop.progress.resume()
        carried = self._carried if self._trainer.current_epoch > 0 else None
        if loaded is not None:
            carried = loaded if "fit" in loaded else None
        executor, rule = options.executor, options.client_rule
        if type(executor) is Sequential and options.adds_up(capacity * self._binding.theta.nbytes):
            executor = AddingUp()
        if self._ranks is not None:
            agreement = on_ranks.Agreement(self._ranks)
            executor = on_ranks.shared_work(self._ranks, options, self._binding, len(loaders), agreement)
            rule = rule if executor.state is None else executor.state.visiting
        clients = ClientSide(self._trainer, self.loop, options, limit, self._binding, batches, capacity, executor, rule)
        self._fit = FederatedFit(options, self._binding, clients, agreement)
        if self._ranks is not None:
            on_ranks.check_same_fit(self._ranks, self._fit.description, self._trainer)
            on_ranks.say_processes(self._ranks, options, loaders.sizes.tolist(), clients.runner.rows)
        if loaded is not None:
            clients.buffers.load_unsaved(loaded.get("non_persistent_buffers", {}))
        self.memory = self._fit.begin(carried)
        return self._fit

    def visit_batches(self, loaders: ClientLoaders) -> int:
        """How long a loader of the clients' data seems to be."""
        options = self._options
        return local_batches(self._trainer, options, 1.0, loaders).mean_visit(options.needs.full_gradients).batches

    # ---- checkpoints

    def begin_round(self) -> None:
        """No hook of the round has run yet."""
        assert self._fit is not None
        self._fit.begin_round()

    def states(self) -> Mapping[str, Any]:
        """What a checkpoint holds of the running fit, or of the last."""
        return (self._carried or {}) if self._fit is None else self._fit.states()

    @property
    def start(self) -> RoundStart | None:
        """What the open round has found; ``None`` if none is open."""
        return None if self._fit is None else self._fit.start

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Lets the module show what a checkpoint is to hold: the parameters that the method wants evaluated."""
        assert self._binding is not None
        self._binding.sync()
        fit = self._fit
        with self._binding.showing(self._binding.theta if fit is None else fit.shown(fit.saved_theta)):
            yield

    def finish(self) -> None:
        """All rounds are over: the module keeps the parameters that the method wants evaluated."""
        assert self._fit is not None
        self._fit.finish()

    def show(self) -> None:
        """Binds the parameters that the method wants evaluated."""
        if self._binding is not None:
            self._binding.sync()
            theta = self._binding.theta
            params = theta if self._fit is None else self._fit.shown(theta)
            if params is not theta:
                self._binding.bind_flat(params)

    def restore(self) -> None:
        """Binds the global parameters."""
        if self._binding is not None:
            self._binding.bind_global()

    def abort(self) -> None:
        """Something was raised: ends workers, and leaves the submodules in training mode."""
        if self._fit is not None:
            self._fit.clients.close()
        if self._binding is not None:
            self.loop.leave_validation()

    def close(self, interrupted: bool) -> None:
        """Gives the parameters storage of their own and keeps what the next fit may go on from."""
        if self._fit is not None:
            # Lightning calls no hooks when nothing is left to do for a resumed fit.
            if not self._fit.finished and not interrupted:
                self._fit.finish()
            self._fit.close()
            self.loop.progress.end_fit()
            self._fallback, self._last_round = self._fit.clients.fallback, self.last_round
            self._carried = self._fit.states()
        if self._binding is not None:
            self._binding.release()
        self._fit, self._binding = None, None
