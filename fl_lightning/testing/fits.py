# SPDX-License-Identifier: Apache-2.0
"""What every client rule and every executor must do, shown by small fits."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from fl_lightning.algorithms import SCAFFOLD, ClientRule, FedAvg, ServerRule
from fl_lightning.arguments import checked
from fl_lightning.client_module import ClientModule
from fl_lightning.clients.base import CohortExecutor
from fl_lightning.clients.parallel import Parallel
from fl_lightning.data import Dirichlet, FederatedDataModule
from fl_lightning.federation.federated_client import FederatedClient
from fl_lightning.federation.federated_server import FederatedServer
from fl_lightning.fit.strategy import FederatedStrategy
from fl_lightning.lightning.names import LightningModule, Trainer
from fl_lightning.testing.requiring import DECLARE, SEEDED, refuse_other, require

_CLIENTS, _ROUNDS = 4, 3
_TRAINER: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip
_FAILURE = "this batch cannot be trained on"
Method = ServerRule | ClientRule


@checked()
def check_client_rule(
    make: Callable[[], ServerRule | ClientRule], *, module: Callable[[], LightningModule] | None = None
) -> None:
    """Checks that a client half works wherever clients train, and that all it keeps is declared.

    Small fits of four clients with new rules must have the same weights: repeated, with the same rule in a second fit,
    resumed from the checkpoint of a round, with clients in two other processes, and with a server and clients that only
    messages join.

    Args:
        make: makes the client rule, which is paired with FedAvg, or a method that has one.
        module: makes the module that is trained, for rules that need something of it; batches are pairs of eight
            numbers and one of three classes. Default a small :class:`~fl_lightning.ClientModule`.

    Raises:
        AssertionError: two fits differ; the message says which, and what usually causes it.
    """
    refuse_other(make, (ServerRule, ClientRule), "client rules or methods")
    fits = _Fits(make, module or _classifier)
    plain = fits.weights()
    strategy = fits.strategy()
    fits.weights(strategy)
    for found, how, advice in (
        (fits.weights, "repeated", SEEDED),
        (partial(fits.weights, strategy), "with the same object in a second fit", DECLARE),
        (fits.resumed, "resumed from a checkpoint", DECLARE),
        (lambda: fits.weights(fits.strategy(executor=Parallel(2))), "with clients in other processes", DECLARE),
        (fits.by_messages, "with a server and clients that messages join", DECLARE),
    ):
        other = found()
        apart = float((plain - other).abs().max())
        problem = f"{type(make()).__name__} gives other weights {how}, by up to {apart:.3g}: {advice}"
        require(torch.equal(plain, other), problem)


@checked()
def check_executor(make: Callable[[], CohortExecutor]) -> None:
    """Checks that an executor gives the bits of clients in turn, twice, and that it reports a client that fails.

    Args:
        make: makes the executor.

    Raises:
        AssertionError: weights differ, clients train in turn instead, or an error of a client's training is lost.
    """
    refuse_other(make, (CohortExecutor,), "executors")
    name = type(make()).__name__
    for method in (FedAvg, SCAFFOLD):
        fits, executor = _Fits(method, _classifier), make()
        plain = fits.weights()
        for when in ("a first fit", "a second fit"):
            strategy = fits.strategy(executor=executor)
            found = fits.weights(strategy)
            fallback = strategy.executor_fallback
            require(fallback is None, f"{name} lets clients train in turn: {fallback}")
            require(torch.equal(plain, found), f"{name} gives other weights in {when} of {method.__name__}")
    failing, words = _Fits(FedAvg, partial(_classifier, _fail)), "none"
    try:
        failing.weights(failing.strategy(executor=make()))
    except Exception as error:  # the client's own, or another one that has it as its cause
        words = f"{error!r}, of {error.__cause__!r}"
    require(_FAILURE in words, f"{name} must let a fit end with the error of a client's training step, found {words}")


class _Fits:
    """Fits of one method that must agree."""

    def __init__(self, make: Callable[[], Method], module: Callable[[], LightningModule]) -> None:
        self._make, self._module = make, module

    def strategy(self, **options: Any) -> FederatedStrategy:
        """With a new rule."""
        rule = self._make()
        client = rule if isinstance(rule, ClientRule) else None
        return FederatedStrategy(FedAvg() if isinstance(rule, ClientRule) else rule, client=client, seed=3, **options)

    def weights(
        self, strategy: FederatedStrategy | None = None, rounds: int = _ROUNDS, resume: Path | None = None,
        save: Path | None = None,
    ) -> Tensor:  # fmt: skip
        """After a fit."""
        module, strategy = self._new_module(), strategy or self.strategy()
        trainer = Trainer(max_epochs=rounds, strategy=strategy, enable_checkpointing=False, **_TRAINER)
        trainer.fit(module, _blobs(), ckpt_path=None if resume is None else str(resume))
        if save is not None:
            trainer.save_checkpoint(save)
        return _all(module)

    def resumed(self) -> Tensor:
        """After a fit that ended early and went on."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "round.ckpt"
            self.weights(rounds=_ROUNDS - 1, save=file)
            return self.weights(resume=file)

    def by_messages(self) -> Tensor:
        """After rounds of a server and clients."""
        loaders = _blobs().train_dataloader()
        server = FederatedServer(self._new_module(), self.strategy(), _CLIENTS, rounds=_ROUNDS)
        clients = []
        for k in range(_CLIENTS):
            own = DataLoader(Subset(loaders.dataset, loaders.indices(k).tolist()), loaders.batch_size, shuffle=True)
            clients.append(FederatedClient(self._new_module(), own, self.strategy(), k, _CLIENTS, _TRAINER))
            server.register(clients[k].introduction())
        for _ in range(_ROUNDS):
            orders = {k: server.message(k) for k in server.open_round()}
            server.close_round({k: clients[k].train(order) for k, order in orders.items()})
        server.finish()
        return _all(server.module)

    def _new_module(self) -> LightningModule:
        torch.manual_seed(0)
        return self._module()


def _all(module: nn.Module) -> Tensor:
    return torch.cat([value.detach().double().flatten() for value in module.state_dict().values()])


def _classifier(loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> ClientModule:
    """With momentum, which is a client's state."""
    net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    return ClientModule(net, loss, partial(torch.optim.SGD, lr=0.1, momentum=0.5))


def _fail(scores: Tensor, targets: Tensor) -> Tensor:
    raise ValueError(_FAILURE)


def _blobs() -> FederatedDataModule:
    """Sixty points of three kinds, in batches of five."""
    dice = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    points = torch.randn(60, 8, generator=dice) + F.one_hot(labels, 8)
    return FederatedDataModule(TensorDataset(points, labels), Dirichlet(_CLIENTS, 1.0), batch_size=5)
