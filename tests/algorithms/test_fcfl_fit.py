# SPDX-License-Identifier: Apache-2.0
"""FCFL in a Trainer on a small table of people, against a loop that computes every gradient itself."""

from __future__ import annotations

from typing import ClassVar

import lightning as L
import numpy as np
import pytest
import torch
from fcfl_vectors import VectorFCFL
from support import Classifier as Plain
from support import federated_blobs, fit, fresh, quiet_trainer, weights
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

import fl_lightning as fl
from fl_lightning.algorithms import FCFL, FairReg

pytestmark = pytest.mark.fit

LR, SIZES, BUDGETS = 0.5, (30, 20, 25), (0.05, 0.2, 0.4)


class Loans(L.LightningModule):
    """Logistic regression on the table below; what ``federated_groups`` logs must get lost."""

    modes: ClassVar[list[bool]] = []  # of the class, because what instances keep is put back

    def __init__(self, batch_norm=False):
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(4) if batch_norm else nn.Identity(), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        loss = binary_cross_entropy_with_logits(self.net(x).squeeze(1), y.float())
        self.log("loan_loss", loss)
        return loss

    def federated_groups(self, batch):
        x, y, a = batch
        self.modes.append(self.training)
        self.log("groups", float(len(y)))
        return self.net(x).squeeze(1), y, a

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR)


def table(lacking=None):
    draw = torch.Generator().manual_seed(4)
    n = sum(SIZES)
    x = torch.randn(n, 4, generator=draw)
    a = (x[:, 0] + 0.5 * torch.randn(n, generator=draw) > 0).long()
    y = (x.sum(1) + torch.randn(n, generator=draw) > 0).long()
    parts = list(torch.arange(n).split(list(SIZES)))
    if lacking is not None:
        a[parts[lacking]] = 0
    return x, y, a, parts


def data(batch_size=100, lacking=None):
    *columns, parts = table(lacking)
    return fl.FederatedDataModule(TensorDataset(*columns), parts, batch_size=batch_size)


def fit_loans(rule, rounds=3, module=None, **options):
    """A fit on the table, with every client in every round unless said otherwise."""
    options = {"data": data(), "clients_per_round": 1.0, "seed": 1, **options}
    return fit(module or fresh(Loans), rounds, algorithm=rule, **options)


def loop(rounds, budget):
    """Stage 1 on gradients that plain PyTorch computes, and whether budgets held in the last round."""
    x, y, a, parts = table()
    module, form = fresh(Loans), VectorFCFL(budget)
    parameters = list(module.parameters())
    for _ in range(rounds):
        values = []
        for part in parts:
            z, label, group = module.net(x[part]).squeeze(1), y[part], a[part]
            p = torch.sigmoid(10 * z)
            loss = binary_cross_entropy_with_logits(z, label.float())
            values.append((loss, (p[group == 1].mean() - p[group == 0].mean()).abs()))
        u, v = (
            [np.concatenate([g.numpy().ravel() for g in torch.autograd.grad(value, parameters, retain_graph=True)])
             for value in column]
            for column in zip(*values, strict=True)
        )  # fmt: skip
        losses, gaps = np.array([[float(value.detach()) for value in pair] for pair in values]).T
        d = form.step(losses, gaps, LR * np.stack(u), LR * np.stack(v), range(3), LR)
        with torch.no_grad():
            for parameter, step in zip(parameters, np.split(d, [4]), strict=True):
                parameter -= torch.from_numpy(step).view(parameter.shape)
    return module, max(gaps) <= budget


@pytest.mark.parametrize("batch_size", [100, 7])
@pytest.mark.parametrize("budget", BUDGETS)
def test_stage_1_equals_a_plain_loop(batch_size, budget):
    module, _, trainer = fit_loans(FCFL(budget), 8, data=data(batch_size))
    expected, held = loop(8, budget)
    torch.testing.assert_close(weights(module), weights(expected), rtol=2e-4, atol=2e-5)
    assert float(trainer.callback_metrics["fed/feasible"]) == held
    assert float(trainer.callback_metrics["fed/without_group"]) == 0


def test_disparities_are_measured_in_eval_mode_and_nothing_is_logged():
    Loans.modes.clear()
    module, _, trainer = fit_loans(FCFL(0.1), 2, module=fresh(Loans, batch_norm=True), buffers="mean")
    assert Loans.modes
    assert not any(Loans.modes)
    assert "groups" not in trainer.callback_metrics
    assert "loan_loss" in trainer.callback_metrics
    assert module.training


class Groupless(Plain):
    federated_groups = None


@pytest.mark.parametrize("rule", [FCFL, FairReg])
def test_a_module_that_knows_no_groups_is_refused_before_the_first_round(rule):
    module = fresh(Groupless)
    with pytest.raises(ValueError, match=r"define federated_groups\(self, batch\) on Groupless, which returns scores"):
        quiet_trainer(fl.FederatedStrategy(rule()), 1).fit(module, federated_blobs())
    assert torch.equal(weights(module), weights(fresh(Groupless)))
