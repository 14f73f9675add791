# SPDX-License-Identifier: Apache-2.0
"""Plain SGD: the same bits as torch's, and torch's own wherever something else is asked for."""

from copy import deepcopy

import pytest
import torch
from support import Classifier, federated_blobs, fresh, training_only, weights
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fl_lightning as fl
from fl_lightning.lightning.fast_sgd import FastSGD


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(37, 19), torch.nn.ReLU(), torch.nn.Linear(19, 3))


def train(model, optimizer, stepper, steps=5):
    x = torch.randn(8, 37, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        stepper.zero_grad()
        model(x).square().mean().backward()
        stepper.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


OPTIONS = [
    {"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.01}, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "maximize": True},
    {"lr": torch.tensor(0.1)}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_same_bits(kind, options):
    if kind is torch.optim.Adam:
        options = {name: value for name, value in options.items() if name in ("lr", "weight_decay", "maximize")}
    one, two = network(), network()
    mine, theirs = kind(one.parameters(), **options), kind(two.parameters(), **options)
    assert torch.equal(train(one, mine, FastSGD(mine)), train(two, theirs, theirs))


def test_groups_and_missing_gradients():
    def made():
        model = network()
        layers = [{"params": model[0].parameters(), "lr": 0.3}, {"params": model[2].parameters(), "weight_decay": 0.1}]
        model.spare = torch.nn.Parameter(torch.ones(2))
        return model, torch.optim.SGD([*layers, {"params": [model.spare]}], lr=0.1)

    (one, mine), (two, theirs) = made(), made()
    assert torch.equal(train(one, mine, FastSGD(mine)), train(two, theirs, theirs))
    assert torch.equal(one.spare, torch.ones(2))


def test_options_may_change_between_steps():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper, reference = FastSGD(optimizer), deepcopy(model)
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    for change in ({}, {"lr": 0.01}, {"momentum": 0.5}, {"momentum": 0.0, "weight_decay": 0.2}):
        optimizer.param_groups[0].update(change)
        other.param_groups[0].update(change)
        assert torch.equal(train(model, optimizer, stepper, 2), train(reference, other, other, 2))


def test_who_listens_to_steps_hears_them():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper, heard = FastSGD(optimizer), []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: heard.append("pre")),
        optimizer.register_step_post_hook(lambda *_: heard.append("post")),
        register_optimizer_step_pre_hook(lambda *_: heard.append("global")),
    ]
    train(model, optimizer, stepper, 1)
    assert sorted(heard) == ["global", "post", "pre"]
    for handle in handles:
        handle.remove()
    own = optimizer.step
    optimizer.step = lambda: (heard.append("patched"), own())[1]
    train(model, optimizer, stepper, 1)
    assert heard[-1] == "patched"


def test_schedulers_do_not_warn(recwarn):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, optimizer, FastSGD(optimizer), 1)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not recwarn.list


@pytest.mark.fit
def test_in_a_trainer_it_steps_instead_of_the_optimizer(monkeypatch):
    def run():
        module = fresh(Classifier)
        training_only(fl.FederatedStrategy(clients_per_round=3), 2).fit(module, federated_blobs())
        return weights(module)

    quick = run()
    for name in ("zero_grad", "step"):
        monkeypatch.setattr(FastSGD, name, lambda self, name=name: getattr(self.wrapped, name)())
    assert torch.equal(quick, run())
