# SPDX-License-Identifier: Apache-2.0
"""A method that a stranger writes from the page on methods of one's own."""

import importlib
from functools import partial
from pathlib import Path

import pytest
import torch
from support import quiet_trainer
from torch import nn
from torch.utils.data import TensorDataset

import fl_lightning as fl


@pytest.fixture
def fair_moo(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return importlib.import_module("fair_moo").FairMOO


@pytest.mark.parametrize("prefer", [0.0, 0.05, 100.0])
def test_it_does_what_every_rule_must_and_never_widens_the_spread(fair_moo, prefer):
    fl.testing.check_server_rule(lambda: fair_moo(prefer))
    dice = torch.Generator().manual_seed(0)
    for _ in range(20):
        rows, losses = torch.randn(5, 8, generator=dice).double(), torch.rand(5, generator=dice).double()
        updates = fl.UpdateMatrix(rows, fl.ParamLayout.from_sizes([3, 5]))
        known = {"sizes": torch.ones(5), "client_ids": tuple(range(5)), "round": 0}
        step = fair_moo(prefer).aggregate(fl.Cohort(torch.zeros(8).double(), updates, losses, **known))
        assert step @ ((losses - losses.mean()) @ rows) >= -1e-9
        torch.testing.assert_close(step.norm(), rows.norm(dim=1).mean())


def test_a_fit_has_less_unequal_losses_than_the_mean(fair_moo):
    dice = torch.Generator().manual_seed(0)
    x, site = torch.randn(120, 4, generator=dice), torch.arange(120) % 6
    y = torch.where(site == 0, x[:, 1], x[:, 0])  # one site of six has a task of its own
    spread = []
    for rule in (fl.algorithms.FedAvg(), fair_moo(0.01)):
        data = fl.FederatedDataModule(
            TensorDataset(x, y[:, None]), fl.data.ByKey(lambda _: site.tolist()), batch_size=20
        )
        model = fl.ClientModule(
            nn.Linear(4, 1), loss=nn.MSELoss(), optimizer=partial(torch.optim.SGD, lr=0.1), num_classes=None
        )
        nn.init.zeros_(model.net.weight)
        strategy = fl.FederatedStrategy(rule, seed=0)
        quiet_trainer(strategy, 15).fit(model, data)
        errors = (model.net(x) - y[:, None]).square().flatten()
        spread.append(torch.stack([errors[site == k].mean() for k in range(6)]).var())
    assert spread[1] < 0.5 * spread[0]
