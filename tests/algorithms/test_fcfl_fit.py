# SPDX-License-Identifier: Apache-2.0
"""FCFL in a Trainer on a small table of people, against a loop that computes every gradient itself."""

from __future__ import annotations

from typing import ClassVar

import lightning as L
import pytest
import torch
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
    """Stage 1 in plain PyTorch, and which case each round was."""
    x, y, a, parts = table()
    module = fresh(Loans)
    parameters, delta_loss, delta_gap = list(module.parameters()), 0.5, 0.5
    path = []
    for _ in range(rounds):
        losses, gaps, u, v = [], [], [], []
        for part in parts:
            z, label, group = module.net(x[part]).squeeze(1), y[part], a[part]
            loss, p = binary_cross_entropy_with_logits(z, label.float()), torch.sigmoid(10 * z)
            gap = (p[group == 1].mean() - p[group == 0].mean()).abs()
            for value, rows in ((loss, u), (gap, v)):
                grads = torch.autograd.grad(value, parameters, retain_graph=True)
                rows.append(torch.cat([g.reshape(-1) for g in grads]))
            losses.append(loss.detach())
            gaps.append(gap.detach())
        down_loss = torch.softmax(torch.stack(losses) / delta_loss, 0) @ torch.stack(u)
        down_gap = torch.softmax((torch.stack(gaps) - budget) / delta_gap, 0) @ torch.stack(v)
        ll, lg, gg = down_loss @ down_loss, down_loss @ down_gap, down_gap @ down_gap
        if max(gaps) <= budget:
            d, case = (down_loss if ll >= lg else down_gap), "feasible"
        elif lg >= 0:
            d, case = (down_gap if gg >= lg else down_loss), "agree"
        else:
            d, case = (ll * down_gap - lg * down_loss) / (ll - lg), "oppose"
        delta_loss *= 0.01 if 0.1 * ll.sqrt() <= delta_loss and delta_loss > 1e-4 else 1
        delta_gap *= 0.01 if 0.1 * gg.sqrt() <= delta_gap and delta_gap > 1e-4 else 1
        path.append(case)
        with torch.no_grad():
            offset = 0
            for parameter in parameters:
                parameter -= LR * d[offset : offset + parameter.numel()].view(parameter.shape)
                offset += parameter.numel()
    return module, path


@pytest.mark.parametrize("batch_size", [100, 7])
@pytest.mark.parametrize("budget", BUDGETS)
def test_stage_1_equals_a_plain_loop(batch_size, budget):
    module, _, trainer = fit_loans(FCFL(budget), 8, data=data(batch_size))
    expected, path = loop(8, budget)
    torch.testing.assert_close(weights(module), weights(expected), rtol=2e-4, atol=2e-5)
    assert float(trainer.callback_metrics["fed/feasible"]) == (path[-1] == "feasible")
    assert float(trainer.callback_metrics["fed/without_group"]) == 0


def test_the_loop_sees_every_case_of_stage_1():
    assert {case for budget in BUDGETS for case in loop(8, budget)[1]} == {"feasible", "agree", "oppose"}


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
