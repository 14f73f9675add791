# SPDX-License-Identifier: Apache-2.0
"""Methods that need the learning rate, where schedules change it within visits; a rate of 0 gives zero rows."""

import math

import pytest
import torch
from schedules import Rated
from support import fit, fresh, on_path, weights
from torch import nn

import fl_lightning as fl
from fl_lightning.algorithms.records import LocalWork
from fl_lightning.algorithms.scaffold import accumulated_rates, accumulated_steps
from fl_lightning.core.cohort import mean_rate
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import rule_state

ALGORITHMS = fl.algorithms
NEEDY = {
    name: getattr(ALGORITHMS, name)
    for name in ("SCAFFOLD", "QFedAvg", "FedMGDAPlus", "FedMDFG", "FedLF", "FedDyn", "FedHEAL", "Ditto", "FCFL")
}


class Warming(Rated):
    """The rate is 0 in the whole first round, and grows with every step from then on."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.hparams.momentum)
        still = self.trainer.estimated_stepping_batches // self.trainer.max_epochs

        def factor(step):
            return max(0, step - still) / 20

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Spy(ALGORITHMS.FedAvg):
    """Keeps what the server sees."""

    needs = ALGORITHMS.Needs(client_lr=True)

    def __init__(self):
        super().__init__()
        self.rates, self.norms = [], []

    def aggregate(self, cohort):
        self.rates.append(cohort.client_lr)
        self.norms.append(float(cohort.updates.norms().max()))
        return super().aggregate(cohort)


@pytest.mark.parametrize("name", NEEDY)
def test_a_rate_of_zero_moves_nobody_and_divides_nothing(name):
    module = fresh(Warming)
    still = fit(module, 1, algorithm=NEEDY[name](), limit_val_batches=0)
    assert torch.equal(weights(module), weights(fresh(Warming)))
    assert still.strategy.last_round.step_norm == 0
    moved = fit(fresh(Warming), 4, algorithm=NEEDY[name](), limit_val_batches=0)
    assert bool(torch.isfinite(weights(moved.module)).all())
    assert not torch.equal(weights(moved.module), weights(module))


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "full"])
def test_the_server_sees_the_mean_rate_of_the_visits(lean):
    module, spy = fresh(Warming), Spy()
    fit(module, 3, algorithm=spy, limit_val_batches=0, **on_path(lean))
    visits, rates = [], []
    for rate, _, _, last in module.seen.rows:
        rates.append(rate)
        if last:
            visits.append(sum(rates) / len(rates))
            rates = []
    assert spy.rates[0] == spy.norms[0] == 0
    assert spy.rates == pytest.approx([sum(visits[i : i + 3]) / 3 for i in (0, 3, 6)])


def test_scaffolds_gradients_are_those_of_the_rates_in_use():
    # A control of a client is the mean of its gradients, whatever the rates of its steps.
    class Constant(Warming):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            return sum((p * (1 + place)).sum() for place, p in enumerate(self.parameters()))

    scaffold = ALGORITHMS.SCAFFOLD()
    fit(fresh(Constant, momentum=0.5), 3, algorithm=scaffold, limit_val_batches=0)
    client = scaffold.client_rule()
    module = fresh(Constant)
    expected = torch.cat([torch.full((p.numel(),), 1.0 + place) for place, p in enumerate(module.parameters())])
    states = [rule_state.client_state(client, i) for i in range(6)]
    controls = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    trained = [control for control in controls if control.norm() > 0]
    assert trained
    for control in trained:
        assert torch.allclose(control, expected, rtol=2e-3)


def test_sums_and_means_of_rates():
    layout = ParamLayout.from_module(nn.Linear(2, 2))
    work = LocalWork(0, 0, nn.Module(), layout, [], torch.zeros(6), 1, client_lr=0.1)
    for _ in range(3):
        work.take_rate(0.1)
        work.steps += 1
    work.end_steps()
    assert (work.client_lr, work.rates) == (0.1, [])
    for rate in (0.1, 0.2, 0.3):
        work.take_rate(rate)
    work.end_steps()
    assert work.client_lr == mean_rate([0.1, 0.2, 0.3]) == pytest.approx(0.2)
    assert mean_rate([0.1] * 3) == 0.1
    assert accumulated_rates([0.1] * 4, 0.9) == pytest.approx(0.1 * accumulated_steps(4, 0.9))
    assert math.isclose(accumulated_rates([0.0, 1.0, 2.0], 0.5), 1.5 + 2 * 1.75)
