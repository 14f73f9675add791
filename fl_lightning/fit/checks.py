# SPDX-License-Identifier: Apache-2.0
"""Checks of methods, trainers, modules and data; every error says what to do instead."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch.optim import SGD, Optimizer, SparseAdam

from fl_lightning.algorithms import groups
from fl_lightning.algorithms.base import ClientRule, ServerRule, overrides
from fl_lightning.algorithms.features import METHOD
from fl_lightning.algorithms.records import Needs
from fl_lightning.clients.schedules import HandSet
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.modules import BatchNorm
from fl_lightning.lightning.inspection import accumulation, overridden_hooks, validation_interval
from fl_lightning.lightning.names import LightningModule, Trainer, TrainerFn, callbacks, rank_zero_warn

_PROBED_STEPS = 1000
"""Steps for which an averaging callback is asked whether it averages after them."""
_MOST_STEPS = 10_000_000
"""A few minutes on any processor: no federation needs more, and a wrong message may name any number."""

_OUTSIDE_STEPS = ("batch_to_device", "lr_scheduler_step")
_BEFORE_STEPS = (*_OUTSIDE_STEPS, "on_train_batch_start")
_AROUND_GRADIENTS = (
    "backward", "on_after_backward", "on_before_backward", "post_backward", "pre_backward", "training_step",
)  # fmt: skip


def paired_client_rule(
    algorithm: ServerRule, client: ClientRule | ServerRule | None, full_gradients: bool = False
) -> ClientRule:
    """The client rule to use with a server rule: the one that was given, or the server rule's own half."""
    own = algorithm.client_rule()
    full_gradients = full_gradients and not algorithm.needs.full_gradients  # those send full gradients anyway
    if full_gradients and overrides(own):
        raise ValueError(
            f"full_gradients=True trains nothing locally, and {type(algorithm).__name__} changes local training: "
            "leave full_gradients out"
        )
    if client is None:
        return own
    rule = client.client_rule() if isinstance(client, ServerRule) else client
    server, given = type(algorithm).__name__, type(client).__name__
    if isinstance(client, ServerRule) and not overrides(rule):
        raise ValueError(f"client={given}(...) has no client half: leave client out, or pass {given} as algorithm")
    if overrides(own) and not isinstance(rule, type(own)):
        raise ValueError(
            f"client={given}(...) cannot replace the client half of {server}: "
            f"pair {given} with a server rule that leaves local training alone, such as FedAvg or FedLF"
        )
    if full_gradients and overrides(rule):
        raise ValueError(
            f"full_gradients=True trains nothing locally, and client={given}(...) changes local training: "
            "leave one of them out"
        )
    if algorithm.needs.full_gradients and overrides(rule) and not (overrides(own) and isinstance(rule, type(own))):
        raise ValueError(
            f"client={given}(...) changes local training, but {server} takes full gradients and trains nothing "
            "locally: leave client out, or use gradient_source='update'"
        )
    reason = rule.refusal(algorithm)
    if reason is not None:
        raise ValueError(f"client={given}(...) {reason}")
    return rule


def check_trainer(trainer: Trainer) -> None:
    """Raises ValueError for trainer options that have no meaning for rounds."""
    interval = validation_interval(trainer)
    # An int counts batches, even 1; without epochs it counts steps, wherever rounds begin and end.
    counts_steps = isinstance(interval, int) and trainer.check_val_every_n_epoch is None
    if not (isinstance(interval, float) and interval == 1.0) and not counts_steps:
        raise ValueError(
            "val_check_interval must be 1.0: a round has no global model in its middle to validate; use "
            "check_val_every_n_epoch to validate every n rounds, or check_val_every_n_epoch=None to validate after "
            f"the round in which every n-th step is taken, found {interval!r}"
        )
    if trainer.overfit_batches:  # type: ignore[attr-defined]
        raise ValueError("overfit_batches is not supported: use limit_train_batches, which counts per client")
    _check_callbacks(trainer)


def _check_callbacks(trainer: Trainer) -> None:
    averaging = getattr(callbacks, "WeightAveraging", ())  # Lightning 2.5 has none
    fitting = trainer.state.fn == TrainerFn.FITTING
    normed = any(isinstance(m, BatchNorm) for m in trainer.lightning_module.modules())
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (callbacks.LearningRateFinder, callbacks.BatchSizeFinder)):
            raise ValueError(
                f"{type(callback).__name__} tries out the batches of one loader, which a round does not have: tune on "
                "undivided data with a Trainer of its own"
            )
        if fitting and isinstance(callback, (callbacks.BaseFinetuning, callbacks.ModelPruning)):
            remedy = "freeze in the module's __init__, setup or on_fit_start, and thaw for a fit with another Trainer"
            if isinstance(callback, callbacks.ModelPruning):
                remedy = "prune the trained module after the fit (torch.nn.utils.prune)"
            raise ValueError(
                f"{type(callback).__name__} changes in mid-fit which parameters are trained, and what is remembered of "
                f"clients and rounds would no longer fit them: {remedy}"
            )
        if isinstance(callback, callbacks.StochasticWeightAveraging) and normed:
            raise ValueError(
                "StochasticWeightAveraging passes over the data once more to renew BatchNorm statistics, which is no "
                "federated round: use layers without running statistics, or EMAWeightAveraging"
            )
        if fitting and isinstance(callback, averaging):
            _check_averaging(callback)


def _check_averaging(callback: Any) -> None:
    """Refuses to average after optimizer steps: the server's weights change once per round."""
    probe = copy.copy(callback)  # a method of the user's own may count its calls
    step = next((step for step in range(_PROBED_STEPS) if probe.should_update(step_idx=step)), None)
    if step is None:
        return
    name, own = type(callback).__name__, type(callback).should_update
    if own is getattr(getattr(callbacks, "EMAWeightAveraging", None), "should_update", None):
        remedy = "pass update_every_n_steps=0 and update_starting_at_epoch=0"
    else:
        remedy = (
            "use a subclass whose should_update(self, step_idx=None, epoch_idx=None) returns epoch_idx is not None, or "
            "EMAWeightAveraging(update_every_n_steps=0, update_starting_at_epoch=0)"
        )
    raise ValueError(
        f"{name} must average whole rounds, because the server's weights change once per round: {remedy}; found "
        f"should_update(step_idx={step}) to be true"
    )


@dataclass(frozen=True)
class Method:
    """A method as checks see it, with both halves under the names that the user gave."""

    server: str  # name of the algorithm
    client: str  # name of what the client half comes from: client, or the algorithm
    own: Needs  # of the algorithm by itself
    needs: Needs  # of both halves together
    rule: ClientRule

    def asking(self, *needs: str) -> str:
        """The name of the half that asks for one of these, by their names in :class:`Needs`."""
        return self.server if any(getattr(self.own, need) for need in needs) else self.client


def check_module(
    module: LightningModule,
    method: Method,
    layout: ParamLayout,
    optimizers: Sequence[Optimizer],
    client_lr: float | None,
) -> None:
    """Raises ValueError for modules that lack what the method needs."""
    needs, rule, asking = method.needs, method.rule, method.asking
    manual = not module.automatic_optimization
    if "dataloader_iter" in signature(module.training_step).parameters:
        raise ValueError(f"{type(module).__name__}.training_step must take a batch, found dataloader_iter")
    if (needs.losses or needs.requery) and manual and not hasattr(module, "federated_loss"):
        raise ValueError(
            f"{asking('losses', 'requery')} needs each client's loss, and {type(module).__name__} optimizes manually: "
            "define federated_loss(self, batch, batch_idx) on the module"
        )
    if needs.accuracies and not callable(getattr(module, "federated_accuracy", None)):
        raise ValueError(
            f"{asking('accuracies')} needs each client's accuracy: define federated_accuracy(self, batch, batch_idx) "
            f"on {type(module).__name__}, the share of the batch that it predicts right"
        )
    if needs.features and not callable(getattr(module, METHOD, None)):
        raise ValueError(
            f"{asking('features')} compares features: define {METHOD}(self, batch) on {type(module).__name__}, which "
            "returns what the network has before its last layer as [B, d], or a pair of that and class indices [B]"
        )
    if needs.groups and not callable(getattr(module, groups.METHOD, None)):
        raise ValueError(
            f"{asking('groups')} compares groups of people: define {groups.METHOD}(self, batch) on "
            f"{type(module).__name__}, which returns scores [B] (class 1 is predicted where they are positive), labels "
            "[B] and groups [B], the last two of 0 and 1"
        )
    rule.check_module(module, layout)
    if needs.full_gradients and manual:
        raise ValueError(
            f"{asking('full_gradients')} needs full gradients, which a module with manual optimization does not give"
        )
    if overrides(rule, "loss_term", "shape_loss") and manual:
        raise ValueError(f"{method.client} changes the loss, which manual optimization keeps to itself")
    corrects = overrides(rule, "correct_gradients")
    if corrects and len(optimizers) > 1:
        raise ValueError(f"{method.client} corrects gradients and needs one optimizer, found {len(optimizers)}")
    if (corrects or needs.dense_gradients) and any(isinstance(optimizer, SparseAdam) for optimizer in optimizers):
        raise ValueError(
            f"{method.client} gives every parameter a dense gradient, and SparseAdam takes sparse gradients alone: use "
            f"another optimizer in {type(module).__name__}.configure_optimizers, such as Adam"
        )
    if (needs.client_lr or needs.full_gradients) and client_lr is None:
        raise ValueError(
            f"{asking('client_lr', 'full_gradients')} needs the clients' learning rate: use one torch.optim.SGD with "
            f"one learning rate for all parameter groups, and without maximize, in {type(module).__name__}."
            "configure_optimizers"
        )


def warn_of_unused_settings(trainer: Trainer, method: Method, limit: int | float) -> None:
    """Warns of settings and hooks of local training that a method does not follow where it does something else."""
    hooks = [(hook.rpartition(".")[2], hook) for hook in overridden_hooks(trainer)]
    parts = [part for optimizer in trainer.optimizers for part in optimizer.param_groups]
    unused = {name: value for part in parts for name in ("momentum", "weight_decay") if (value := part.get(name))}
    if trainer.gradient_clip_val:
        unused["gradient_clip_val"] = trainer.gradient_clip_val
    if not method.needs.full_gradients:
        work = method.rule.own_work
        left_out = [hook for name, hook in hooks if work == "gradients" and name in _AROUND_GRADIENTS]
        if work == "steps":
            left_out = [type(optimizer).__name__ for optimizer in trainer.optimizers if type(optimizer) is not SGD]
            left_out += [f"{name}={value}" for name, value in unused.items()]
            left_out += [hook for name, hook in hooks if name not in _BEFORE_STEPS]
        if left_out:
            words = "plain SGD steps" if work == "steps" else work
            rank_zero_warn(f"{method.client} computes {words} of its own, without these: {', '.join(left_out)}")
        return
    if isinstance(limit, int) or limit < 1:
        unused["limit_train_batches"] = limit
    if accumulation(trainer) > 1:
        unused["accumulate_grad_batches"] = accumulation(trainer)
    named = [f"{name}={value}" for name, value in unused.items()]
    named += [hook for name, hook in hooks if name not in _OUTSIDE_STEPS]
    if named:
        rank_zero_warn(
            f"{method.asking('full_gradients')} sends the gradient of all of a client's data and trains nothing "
            f"locally, so these have no effect: {', '.join(named)}"
        )


def check_schedulers(trainer: Trainer) -> None:
    """Raises ValueError for learning-rate schedulers that cannot step inside a client's visit."""
    for config in trainer.lr_scheduler_configs:
        if config.interval != "step" or not trainer.lightning_module.automatic_optimization:
            continue
        name = f"lr scheduler {type(config.scheduler).__name__}"
        if config.reduce_on_plateau:
            raise ValueError(
                f"{name} has interval='step', and a round has nothing to monitor before it ends: use interval='epoch', "
                "which steps once per round"
            )


def check_accumulation(trainer: Trainer, window: int) -> None:
    """Raises ValueError if somebody has changed how many batches a step takes: the length of a round depends on it."""
    if trainer.accumulate_grad_batches != window:
        raise ValueError(
            "accumulate_grad_batches must stay as it is during a fit, because every round counts as equally many "
            f"optimizer steps, found {trainer.accumulate_grad_batches} in round {trainer.current_epoch} after {window}"
        )


def check_visit_schedulers(trainer: Trainer, knows_clock: bool, steps: int) -> None:
    """Refuses schedulers that a client cannot bring to the round by itself: nobody sends their states.

    ``knows_clock`` says that the client knows how long a round is; ``steps`` are those of the rounds so far.
    """
    for config in trainer.lr_scheduler_configs:
        name = type(config.scheduler).__name__
        if config.reduce_on_plateau:
            raise ValueError(
                f"{name} steps by a validation metric, which the server has: set the learning rate there, or use a "
                "scheduler that counts rounds"
            )
        if not trainer.lightning_module.automatic_optimization:
            refuse_steps_by_hand(trainer, [1])
        if not knows_clock and config.interval == "step":
            raise ValueError(
                f"{name} steps within visits, and a client alone does not know what a round counts as: the server must "
                "send ServerMessage(steps_per_round=...), see FitDescription.steps_per_round"
            )
        if config.interval == "step" and steps > _MOST_STEPS:
            raise ValueError(
                f"{name} steps within visits, and a client moves it through all rounds so far: they must have at most "
                f"{_MOST_STEPS:,} steps, found {steps:,}"
            )


def refuse_steps_by_hand(trainer: Trainer, calls: Sequence[int], hand_set: HandSet = ()) -> None:
    """Refuses schedulers and options that a module moves itself: how far depends on visits of others."""
    stepped = zip(trainer.lr_scheduler_configs, calls, strict=False)
    moved = [f"{type(config.scheduler).__name__} is stepped" for config, times in stepped if times]
    moved += [f"{name!r} of param_groups is set" for groups in hand_set for group in groups for name in group]
    if moved:
        raise ValueError(
            f"{moved[0]} by hand, and a client alone does not know how far the others' visits moved it: compute the "
            "learning rate from self.current_epoch, which is the round, or let Lightning step a scheduler"
        )
