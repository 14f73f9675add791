# SPDX-License-Identifier: Apache-2.0
"""FedLF beside FedAvg on the demo's digits: what the README claims, with lr and rounds as the demo fixes them."""

import importlib
from pathlib import Path
from statistics import fmean

import lightning as L
import pytest
import torch
from support import quiet_trainer

import fl_lightning as fl

EXAMPLES = Path(__file__).parents[2] / "examples"
LAST = 5


class Curve(L.Callback):
    """Mean and angle of the last rounds; the others are not evaluated."""

    def __init__(self):
        self.mean, self.angle = [], []

    def on_train_epoch_start(self, trainer, pl_module):
        last = trainer.current_epoch >= trainer.max_epochs - LAST
        trainer.check_val_every_n_epoch = 1 if last else trainer.max_epochs + 1

    def on_validation_end(self, trainer, pl_module):
        values = trainer.strategy.last_evaluation.values["val_acc"]
        self.mean.append(float(values.mean()))
        self.angle.append(float(fl.metrics.functional.fairness_angle(values)))


class Watched(fl.algorithms.FedLF):
    """Counts conflicts from the vectors themselves, in float64, for the model and for every block."""

    def __init__(self):
        super().__init__(layers="module")
        self.rounds, self.conflicts, self.degenerate = 0, 0, 0

    def aggregate(self, cohort):
        step = super().aggregate(cohort)
        rows, wide = cohort.updates.rows.double(), step.double()
        starts = cohort.updates.layout.layer_starts
        blocks = self.blocks or tuple((layer,) for layer in range(len(starts) - 1))
        self.conflicts += int((rows @ wide < 0).sum())
        for block in blocks:
            columns = torch.cat([torch.arange(starts[layer], starts[layer + 1]) for layer in block])
            self.conflicts += int((rows[:, columns] @ wide[columns] < 0).sum())
        self.rounds += 1
        self.degenerate += self.report.flagged or len(blocks) < len(starts) - 1
        return step


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("demo"), importlib.import_module("digits")


def train(demo, algorithm, seed):
    settings, digits = demo
    torch.manual_seed(seed)
    curve = Curve()
    data = fl.FederatedDataModule(
        digits.Digits(), fl.data.Pathological(settings.CLIENTS, settings.CLASSES_EACH), seed=seed
    )
    strategy = fl.FederatedStrategy(algorithm, clients_per_round=settings.PER_ROUND, seed=seed)
    quiet_trainer(strategy, settings.ROUNDS, callbacks=[curve]).fit(digits.DigitClassifier(lr=settings.LR), data)
    assert len(curve.mean) == LAST
    return fmean(curve.mean), fmean(curve.angle)


@pytest.mark.slow
def test_fedlf_is_fairer_at_no_lower_mean_and_nobody_conflicts(demo):
    plain = [train(demo, fl.algorithms.FedAvg(), seed) for seed in range(3)]
    rules = [Watched() for _ in range(3)]
    fair = [train(demo, rule, seed) for seed, rule in enumerate(rules)]
    assert fmean(angle for _, angle in fair) <= 0.7 * fmean(angle for _, angle in plain)
    assert fmean(mean for mean, _ in fair) >= fmean(mean for mean, _ in plain)
    assert sum(rule.conflicts for rule in rules) == 0
    assert sum(rule.degenerate for rule in rules) <= 0.02 * sum(rule.rounds for rule in rules)
