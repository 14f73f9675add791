# SPDX-License-Identifier: Apache-2.0
"""How long a client's visit is on the clock of a fit."""

from __future__ import annotations

from dataclasses import replace

from fl_lightning.core.lightning.inspection import accumulation
from fl_lightning.core.lightning.names import Trainer
from fl_lightning.core.lightning.visit_clock import VisitPlan
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.simulation.client_options import ClientOptions
from fl_lightning.simulation.federation_messages import ServerMessage
from fl_lightning.training.client_batches import ClientBatches


def visit_plan(trainer: Trainer, options: ClientOptions, limit: int | float, loaders: ClientLoaders) -> VisitPlan:
    """The visit that the clock of a fit counts by, which ``configure_optimizers`` may ask for.

    Args:
        trainer: the trainer.
        options: how clients train.
        limit: the trainer's ``limit_train_batches``.
        loaders: the clients' training data.
    """
    batches = ClientBatches(loaders, options.local(limit), accumulation(trainer), trainer.lightning_module)
    return batches.plan(options.needs.full_gradients)


def federation_plan(
    message: ServerMessage, own: VisitPlan, has_all: bool, local_epochs: int, full_gradients: bool
) -> VisitPlan | None:
    """The same as far as a client of a real federation can know it; ``None`` if it does not.

    Args:
        message: from the server.
        own: the plan by the data that the client has.
        has_all: these are the data of all clients.
        local_epochs: passes over the data per round.
        full_gradients: clients take one step per round.

    Raises:
        ValueError: the message and the data, or the schedule of the round before, say different things.
    """
    given, known = message.steps_per_round, own if has_all else None
    if message.schedule is not None:
        before = VisitPlan(**message.schedule["clock"]["plan"])
        if known is not None and known.steps != before.steps:
            raise ValueError(f"schedule must be of rounds of {known.steps} steps, found {before.steps}")
        known = known or before
    if known is not None and given not in (None, known.steps):
        raise ValueError(f"steps_per_round must be that of the federation, {known.steps}, found {given}")
    if known is not None or given is None:
        return known
    if full_gradients:
        return replace(own, steps=given)
    batches = given * own.window
    return VisitPlan(given, batches, -(-batches // local_epochs), own.window)
