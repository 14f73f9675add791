# SPDX-License-Identifier: Apache-2.0
"""The fits of one strategy: the running one, and what the next one goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.core.lightning.epoch_loop import FederatedEpochLoop
from fl_lightning.core.lightning.names import LightningModule, Trainer
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.simulation.fit import FederatedFit
from fl_lightning.simulation.options import FitOptions
from fl_lightning.training.bound_parameters import BoundParameters


class FitLifecycle:
    """Binds the module for a fit, runs a session in it, and keeps the method's state from fit to fit.

    Attributes:
        binding: the module's parameters in one vector, from the setup of a fit to its teardown.
        session: the running fit, from the moment its data are there.
        detour: why the last finished fit trained clients one after the other although it was asked not to.
    """

    def __init__(self) -> None:
        self.binding: BoundParameters | None = None
        self.session: FederatedFit | None = None
        self.detour: str | None = None
        self._carried: dict[str, Any] | None = None
        self._trained: Tensor | None = None
        self._finished = False

    def bind(self, module: LightningModule, algorithm: ServerRule, rule: ClientRule) -> None:
        """A fit of this module with this method is set up."""
        self._algorithm, self._rule = algorithm, rule
        self.binding = BoundParameters(module, algorithm.layers)

    def open(
        self,
        trainer: Trainer,
        loop: FederatedEpochLoop,
        options: FitOptions,
        loaders: ClientLoaders,
        loaded: dict[str, Any] | None,
    ) -> None:
        """The clients' data are there: begins the fit, or goes on with data loaded anew.

        Args:
            trainer: the trainer.
            loop: the federated epoch loop.
            options: the strategy's arguments.
            loaders: the clients' training data.
            loaded: the federated state of the checkpoint that was loaded, if any.
        """
        assert self.binding is not None
        if self.session is not None:
            self.session.reload(loaders)
            return
        self.binding = self.binding.renewed(self._algorithm.layers)
        loop.position.go_on()
        carried = self._carried
        if loaded is not None:
            carried = loaded if "fit" in loaded else None
        elif trainer.current_epoch == 0:
            carried = None
        self.session = FederatedFit(trainer, loop, self._algorithm, self._rule, options, self.binding, loaders)
        self.session.begin(carried)
        self._trained, self._finished = None, False
        trained, theta = (carried or {}).get("trained"), self.binding.theta
        # A checkpoint and a fit that is over leave the parameters to evaluate in the module: go on from those that were
        # trained, unless the module was given other weights since. Another device may compute them a little otherwise.
        if trained is not None and _same(self._algorithm.evaluation_params(trained.to(theta)), theta):
            theta.copy_(trained)

    def states(self) -> Mapping[str, Any]:
        """What a checkpoint holds of the running fit, or of the last."""
        if self.session is None:
            return self._carried or {}
        assert self.binding is not None
        theta = self.binding.theta
        trained = self._trained if self._finished or self._shown() is theta else theta
        return {**self.session.states(), "trained": trained}

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Lets the module show what a checkpoint is to hold: the parameters that the method wants evaluated."""
        assert self.binding is not None
        self.binding.fetch()
        with self.binding.showing(self._shown()):
            yield

    def _shown(self) -> Tensor:
        assert self.binding is not None
        theta = self.binding.theta
        return theta if self.session is None or self._finished else self._algorithm.evaluation_params(theta)

    def with_global_buffers(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The module's state dictionary with the buffers that a client in training has changed as they were."""
        buffers = {} if self.session is None else self.session.global_buffers()
        return {name: buffers.get(name, value) for name, value in state.items()}

    def finish(self) -> None:
        """All rounds are over: the module keeps the parameters that the method wants evaluated."""
        assert self.binding is not None
        self._finished = True
        theta = self.binding.theta
        final = self._algorithm.evaluation_params(theta)
        if final is not theta:
            self._trained = theta.clone()
            theta.copy_(final)

    def show(self) -> None:
        """Binds the parameters that the method wants evaluated."""
        if self.binding is not None:
            self.binding.fetch()
            params = self._shown()
            if params is not self.binding.theta:
                self.binding.bind_flat(params)

    def put_back(self) -> None:
        """Binds the global parameters."""
        if self.binding is not None:
            self.binding.bind_global()

    def close(self, interrupted: bool) -> None:
        """Gives the parameters storage of their own and keeps what the next fit may go on from."""
        if self.session is not None:
            # Lightning calls no hooks when nothing is left to do for a resumed fit.
            if not self._finished and not interrupted:
                self.finish()
            self.session.close()
            self.detour = self.session.bench.detour
            self._carried = dict(self.states())
        if self.binding is not None:
            self.binding.release()
        self.session, self.binding = None, None


def _same(params: Tensor, others: Tensor) -> bool:
    return torch.allclose(params, others, rtol=8 * torch.finfo(params.dtype).eps, atol=0.0, equal_nan=True)
