# SPDX-License-Identifier: Apache-2.0
"""What a comparison of two moments of a module notices, and what it must not take for a change."""

from collections import deque

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


def between(first, second, metrics=True):
    """The names that the second change adds to the first."""
    module = fresh(Keeping)

    def take():
        found = Fingerprint()
        found.add_module(module, metrics)
        found.add_structure(module)
        return found

    first(module)
    before = take()
    second(module)
    return before.changes(take())


def changes(change, metrics=True):
    return between(lambda module: None, change, metrics)


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


LONG = {
    "a list": (lambda: [0] * 600, lambda long: long.__setitem__(300, 1)),
    "a deque": (lambda: deque(range(600)), lambda long: long.rotate(1)),
    "a dictionary": (lambda: dict.fromkeys(range(600), 0.0), lambda long: long.update({300: 1.0})),
    "a set": (lambda: set(range(600)), lambda long: long.symmetric_difference_update({300, 600})),
    "lists in a list": (lambda: [[0] for _ in range(600)], lambda long: long[300].append(1)),
    "lists in a dictionary": (lambda: {k: [0] for k in range(600)}, lambda long: long[300].append(1)),
    "tensors in a list": (lambda: [torch.zeros(1) for _ in range(600)], lambda long: long.reverse()),
    "what is in tensors": (lambda: [torch.zeros(1) for _ in range(600)], lambda long: long[300].add_(1)),
    "what is in objects": (lambda: [Helper() for _ in range(600)], lambda long: setattr(long[300], "count", 1)),
    "very many tensors": (lambda: [torch.zeros(1) for _ in range(6000)], lambda long: long.reverse()),
    "arrays in a list": (lambda: [np.zeros(1) for _ in range(600)], lambda long: long[300].fill(1)),
    "an array": (lambda: np.zeros(600_000), lambda long: long.__setitem__(300_000, 1)),
    "a view": (lambda: np.zeros((600, 600)).T, lambda long: long.__setitem__((300, 300), 1)),
}


@pytest.mark.parametrize("kind", LONG)
def test_one_of_many_items_counts(kind):
    make, change = LONG[kind]
    long = make()

    def put(module):
        module.cache = long

    def put_changed(module):
        module.cache = long
        change(long)

    assert between(put, put) == []
    assert between(put, put_changed) == ["cache"]


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
