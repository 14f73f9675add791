# SPDX-License-Identifier: Apache-2.0
"""What the strategy refuses, each with a sentence that says what to do instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fl_lightning._lightning import LightningModule, Trainer, lightning_module
from fl_lightning.algorithms.base import ClientRule, Needs, ServerRule


def refuse_devices(devices: Sequence[torch.device] | None) -> torch.device:
    """Returns the one device to run on.

    Raises:
        ValueError: more than one device, or a kind that is not supported.
    """
    found = list(devices or [torch.device("cpu")])
    if found[0].type == "cpu":
        # Lightning counts CPU "devices" as processes; one device object stands for each.
        if len(found) > 1:
            raise ValueError(f"FederatedStrategy runs on one device: pass Trainer(devices=1), found {len(found)}")
        return torch.device("cpu")
    if len(found) > 1:
        raise ValueError(f"FederatedStrategy runs on one device: pass Trainer(devices=1), found {found}")
    if found[0].type not in ("cuda", "mps"):
        raise ValueError(f"FederatedStrategy runs on CPU, CUDA or MPS, found {found[0]}")
    return found[0]


def refuse_pair(algorithm: ServerRule, client: ClientRule | ServerRule | None) -> ClientRule:
    """Returns the client rule to use.

    Raises:
        ValueError: the server rule and the client rule do not fit together.
    """
    own = algorithm.client_rule()
    if client is None:
        return own
    rule = client.client_rule() if isinstance(client, ServerRule) else client
    server, given = type(algorithm).__name__, type(client).__name__
    if type(own) is not ClientRule and type(own) is not type(rule):
        raise ValueError(
            f"client={given}(...) cannot replace the client half of {server}: "
            f"pair {given} with a server rule that leaves local training alone, such as FedAvg or FedLF"
        )
    if algorithm.needs.full_gradients and type(rule) is not ClientRule:
        raise ValueError(
            f"client={given}(...) changes local training, but {server} takes full gradients and trains nothing locally: "
            "leave client out, or use gradient_source='update'"
        )
    return rule


def refuse_trainer(trainer: Trainer) -> None:
    """Raises ValueError for trainer options that have no meaning for rounds."""
    seconds = getattr(trainer, "_val_check_time_interval", None)
    interval = getattr(trainer, "val_check_interval", 1.0) if seconds is None else f"{seconds} seconds"
    # An int counts batches, even 1.
    if not (isinstance(interval, float) and interval == 1.0):
        raise ValueError(
            "val_check_interval must be 1.0: a round has no global model in its middle to validate; "
            f"use check_val_every_n_epoch to validate every n rounds, found {interval!r}"
        )
    if trainer.overfit_batches:  # type: ignore[attr-defined]
        raise ValueError("overfit_batches is not supported: use limit_train_batches, which counts per client")
    _refuse_averaging(trainer)


def _refuse_averaging(trainer: Trainer) -> None:
    callbacks = lightning_module("callbacks")
    ema = getattr(callbacks, "EMAWeightAveraging", ())
    normed = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in trainer.lightning_module.modules())
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.StochasticWeightAveraging) and normed:
            raise ValueError(
                "StochasticWeightAveraging passes over the data once more to renew BatchNorm statistics, which is no "
                "federated round: use layers without running statistics, or EMAWeightAveraging"
            )
        if isinstance(callback, ema) and callback.update_every_n_steps > 0:
            raise ValueError(
                "EMAWeightAveraging must average whole rounds: pass update_every_n_steps=0 and "
                f"update_starting_at_epoch=0, found update_every_n_steps={callback.update_every_n_steps}"
            )


def refuse_module(
    module: LightningModule, needs: Needs, rule: ClientRule, optimizers: int, client_lr: float | None, method: str
) -> None:
    """Raises ValueError for modules that lack what the method needs."""
    manual = not module.automatic_optimization
    if (needs.losses or needs.requery) and manual and not hasattr(module, "federated_loss"):
        raise ValueError(
            f"{method} needs each client's loss, and {type(module).__name__} optimizes manually: "
            "define federated_loss(self, batch, batch_idx) on the module"
        )
    if needs.full_gradients and manual:
        raise ValueError(f"{method} needs full gradients, which a module with manual optimization does not give")
    if type(rule).loss_term is not ClientRule.loss_term and manual:
        raise ValueError(f"{type(rule).__name__} adds a term to the loss, which manual optimization keeps to itself")
    if type(rule).correct_gradients is not ClientRule.correct_gradients and optimizers > 1:
        raise ValueError(f"{type(rule).__name__} corrects gradients and needs one optimizer, found {optimizers}")
    if needs.client_lr and client_lr is None:
        raise ValueError(
            f"{method} needs the clients' learning rate: use one torch.optim.SGD with one learning rate "
            f"for all parameter groups in {type(module).__name__}.configure_optimizers"
        )


def refuse_schedulers(configs: Sequence[Any]) -> None:
    """Raises ValueError for learning-rate schedulers that want to step inside a round."""
    for config in configs:
        if config.interval != "epoch":
            raise ValueError(
                f"lr scheduler {type(config.scheduler).__name__} has interval={config.interval!r}: local steps of "
                "different clients have no common count; use interval='epoch', which steps once per round"
            )


def refuse_data(loader: object) -> None:
    """Raises TypeError for training data that is not divided among clients."""
    raise TypeError(
        "FederatedStrategy trains on clients: wrap the data, "
        "data = fl.FederatedDataModule(my_datamodule, fl.data.Dirichlet(num_clients=100, alpha=0.1)), "
        f"and call trainer.fit(model, data); found a {type(loader).__name__}"
    )


def refuse_checkpoint(found: str, expected: str) -> None:
    """Raises ValueError if a checkpoint belongs to another method."""
    if found != expected:
        raise ValueError(f"the checkpoint was written by {found}, and this fit uses {expected}: use the same method")
