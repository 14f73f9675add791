# SPDX-License-Identifier: Apache-2.0
"""The quick walk over submodules finds what torch finds."""

import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from fl_lightning.core.modules import outside_metrics, preserve_modes, submodules


class Wrapping(MulticlassAccuracy):
    """A metric with a network of its own."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(num_classes=2)
        self.network = network


def project() -> nn.Module:
    module = nn.Module()
    shared = nn.Linear(2, 2)
    module.body = nn.Sequential(shared, nn.Sequential(nn.BatchNorm1d(2), shared), nn.ReLU())
    module.nothing = None
    module.register_module("absent", None)
    module.scores = MetricCollection({"acc": MulticlassAccuracy(2), "f1": MulticlassF1Score(2)})
    module.again = module.body[2]
    return module


def test_it_finds_what_torch_finds_in_the_same_order():
    module = project()
    assert [(name, id(part)) for name, part in submodules(module)] == [
        (name, id(part)) for name, part in module.named_modules()
    ]


def test_metrics_and_their_parts_are_left_out_also_where_the_module_holds_them_too():
    module = project()
    module.extractor = nn.Linear(2, 2)
    module.distance = Wrapping(module.extractor)
    names = [name for name, _ in outside_metrics(submodules(module))]
    assert names == ["", "body", "body.0", "body.1", "body.1.0", "body.2", "scores"]


def test_modes_come_back_after_an_error_too():
    module = project()
    module.body[1].eval()
    before = [part.training for part in module.modules()]

    def fail():
        with preserve_modes(submodules(module)):
            module.eval()
            module.body[1].train()
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        fail()
    assert [part.training for part in module.modules()] == before


def test_the_walk_does_not_hash_metrics(monkeypatch):
    module = project()

    def refuse(self):
        raise AssertionError("hashed")

    monkeypatch.setattr(MulticlassAccuracy, "__hash__", refuse)
    assert len(outside_metrics(submodules(module))) < len(submodules(module))
    assert torch.is_tensor(module.body(torch.ones(2, 2)))
