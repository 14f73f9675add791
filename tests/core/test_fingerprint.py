# SPDX-License-Identifier: Apache-2.0
"""What a comparison of two moments of a module notices, and what it must not take for a change."""

import numpy as np
import pytest
import torch
from support import Classifier, fresh
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.core.fingerprint import Fingerprint, is_metric


class Keeping(Classifier):
    def __init__(self):
        super().__init__()
        self.net[0].calls = 0
        self.outputs, self.cache, self.rows = [], {"a": [float("nan")]}, np.zeros(3)
        self.generator, self.weight = torch.Generator(), torch.ones(2)
        self.helper, self.metric = Helper(), MulticlassAccuracy(3)


class Helper:
    """Refers to itself."""

    def __init__(self):
        self.own, self.count = self, 0


def changes(change, metrics=True):
    module = fresh(Keeping)

    def take():
        found = Fingerprint()
        found.add_module(module, metrics)
        found.add_structure(module)
        return found

    before = take()
    change(module)
    return before.changes(take())


def add_buffer(module):
    module.net[0].register_buffer("cache", torch.ones(1), persistent=False)


CHANGES = {
    "outputs": lambda m: m.outputs.append(1),
    "cache": lambda m: m.cache["a"].append(1),
    "rows": lambda m: np.add(m.rows, 1, out=m.rows),
    "generator": lambda m: torch.rand(1, generator=m.generator),
    "weight": lambda m: m.weight.mul_(2),
    "helper": lambda m: setattr(m.helper, "count", 1),
    "added": lambda m: setattr(m, "added", None),
    "net.0.calls": lambda m: setattr(m.net[0], "calls", 1),
    "net.0._forward_hooks": lambda m: m.net[0].register_forward_hook(print),
    "net.0.training": lambda m: m.net[0].eval(),
    "_automatic_optimization": lambda m: setattr(m, "automatic_optimization", False),
    "metric": lambda m: m.metric.update(torch.tensor([1]), torch.tensor([1])),
    "structure of net.0": lambda m: m.net[0].weight.requires_grad_(False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_named(name):
    assert changes(CHANGES[name]) == [name]
    assert is_metric(fresh(Keeping), name) == (name == "metric")


def test_a_new_buffer_is_named():
    assert changes(add_buffer) == ["net.0._non_persistent_buffers_set", "structure of net.0"]


def weights_and_buffers(module):
    with torch.no_grad():
        nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in module.parameters())), module.parameters())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: None,
        weights_and_buffers,
        lambda m: vars(m).update(log=print, log_dict=print, federated_features=print, _current_fx_name="a"),
        lambda m: vars(m).update(cache={"a": [float("nan")]}),
    ],
)
def test_what_is_no_change(change):
    assert not changes(change)


def test_metrics_are_left_out_on_request():
    assert not changes(CHANGES["metric"], metrics=False)
