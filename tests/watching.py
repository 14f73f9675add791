# SPDX-License-Identifier: Apache-2.0
"""What a fit shows to a callback, and to its method."""

import copy

from lightning.pytorch.callbacks import Callback
from support import weights

from fl_lightning.algorithms import FedAvg, Needs


class Watcher(Callback):
    """Notes the weights at chosen moments."""

    def __init__(self):
        self.validated, self.started, self.ended = [], [], []

    def on_train_epoch_start(self, trainer, pl_module):
        self.started.append(weights(pl_module))

    def on_validation_start(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.validated.append(weights(pl_module))

    def on_train_epoch_end(self, trainer, pl_module):
        self.ended.append(weights(pl_module))


class Records(Callback):
    """Notes the records of rounds and evaluations as they come."""

    def __init__(self):
        self.rounds, self.evaluations = [], []

    def on_validation_end(self, trainer, pl_module):
        self.evaluations.append(trainer.strategy.last_evaluation)

    def on_train_epoch_end(self, trainer, pl_module):
        self.rounds.append(trainer.strategy.last_round)


class States(Callback):
    """Keeps weights, buffers, everything that is remembered and the record, after every round."""

    def __init__(self):
        self.seen, self.records = [], []

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen.append(copy.deepcopy({"weights": weights(pl_module), **remembered(trainer.strategy)}))
        self.records.append(trainer.strategy.last_round)


def remembered(strategy):
    """What methods, clients and optimizers remember."""
    counters = ("fit", "skipped_rounds", "failed_rounds")
    return {name: state for name, state in strategy._fits.states().items() if name not in counters}


class Recorder(FedAvg):
    """FedAvg that keeps what it saw, and asks for what it is told."""

    def __init__(self, weighting="samples", **needs):
        super().__init__(weighting)
        self.needs = Needs(**needs)
        self.cohorts, self.rows, self.params, self.steps = [], [], [], []

    def aggregate(self, cohort):
        step = super().aggregate(cohort)
        self.cohorts.append(cohort)
        self.rows.append(cohort.updates.rows.clone())
        self.params.append(cohort.params.clone())
        self.steps.append(step.clone())
        return step
