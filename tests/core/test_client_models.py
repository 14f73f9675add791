# SPDX-License-Identifier: Apache-2.0
"""Models of clients in files, and the module standing in for them."""

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

import fl_lightning as fl
from fl_lightning.core.model_snapshot import Snapshot, packed_buffers, standing_in
from fl_lightning.core.storage.at_clients import ClientFiles


def snapshot(value, n=4):
    return Snapshot(torch.full((n,), float(value)), torch.tensor([value, 7], dtype=torch.uint8))


class Mixed(nn.Module):
    """Buffers of several dtypes, one under two names, a cache, a metric."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("scale", torch.randn(3, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.other = nn.Module()
        self.other.register_buffer("alias", self.scale)
        self.metric = MeanMetric()

    def forward(self, x):
        self.cache += 1
        self.scale.mul_(2)
        return self.norm(self.layer(x))


def everything(module):
    return [(name, value.clone(), id(value)) for name, value in (*module.named_parameters(), *module.named_buffers())]


def same(one, two):
    return all(a[0] == b[0] and a[2] == b[2] and torch.equal(a[1], b[1]) for a, b in zip(one, two, strict=True))


def test_standing_in_leaves_no_trace_and_keeps_graphs_valid():
    torch.manual_seed(0)
    module, x = Mixed(), torch.randn(5, 3)
    layout = fl.ParamLayout.from_module(module)
    parameters = layout.parameters(module)
    other = Snapshot(torch.randn(layout.numel), packed_buffers(module, torch.device("cpu")))
    expected = torch.autograd.grad(module.norm(module.layer(x)).square().sum(), parameters)
    before = everything(module)
    loss = module.norm(module.layer(x)).square().sum()
    before = everything(module)
    with standing_in(module, parameters, layout, other, evaluate=True):
        assert torch.equal(layout.flatten(parameters), other.params)
        assert not module.training
        assert module.other.alias is module.scale
        module(x)
    with standing_in(module, parameters, layout):
        assert module.training
        module(x)
    with pytest.raises(RuntimeError, match="shapes"), standing_in(module, parameters, layout, other):
        module(x[:, :2])
    assert same(before, everything(module))
    assert module.training
    for one, two in zip(torch.autograd.grad(loss, parameters), expected, strict=True):
        torch.testing.assert_close(one, two)


def test_buffers_come_through_exactly():
    torch.manual_seed(1)
    module, x = Mixed(), torch.randn(5, 3)
    layout = fl.ParamLayout.from_module(module)
    parameters = layout.parameters(module)
    module(x)
    model = Snapshot(layout.flatten(parameters), packed_buffers(module, torch.device("cpu")))
    kept = {name: value.clone() for name, value in module.named_buffers() if name != "cache"}
    assert len(model.buffers) == 3 + 3 * 2 + 2 * 4 * 2 + 8  # flag, scale once, running statistics, batches counted
    for _ in range(3):
        module(x)
    assert not torch.equal(module.scale, kept["scale"])
    with standing_in(module, parameters, layout, model):
        for name, value in module.named_buffers():
            assert name == "cache" or torch.equal(value, kept[name]), name
    cut = standing_in(module, parameters, layout, Snapshot(model.params, model.buffers[:5]))
    with pytest.raises(ValueError, match="must have 33 B of buffers, found 5 B"), cut:
        pass


def names(directory):
    return sorted(f"{file.parent.name[-1]}:{file.stem[-1]}" for file in directory.rglob("*.pt"))


def test_models_in_files(tmp_path):
    files = ClientFiles(tmp_path)
    files.keep(0, snapshot(1), when=1)
    files.keep(0, snapshot(2), when=2)  # nothing refers to round 1
    assert names(tmp_path) == ["0:2"]
    first = files.state_dict()
    assert torch.equal(first["files"], files.state_dict()["files"])
    files.keep(0, snapshot(3), when=3)
    files.keep(5, snapshot(4), when=3)
    assert names(tmp_path) == ["0:2", "0:3", "5:3"]
    second = files.state_dict()
    files.keep(0, snapshot(6), when=6)
    assert names(tmp_path) == ["0:2", "0:3", "0:6", "5:3"]
    assert torch.equal(files.get(0).params, snapshot(6).params)
    files.state_dict()  # the first is no longer among the last two
    assert names(tmp_path) == ["0:3", "0:6", "5:3"]
    restored = ClientFiles(tmp_path)
    restored.load_state_dict(second)
    assert torch.equal(restored.get(0).params, snapshot(3).params)
    assert torch.equal(restored.get(5).buffers, snapshot(4).buffers)
    assert restored.get(1) is None
    with pytest.raises(FileNotFoundError, match="model of client 0 after round 2"):
        restored.load_state_dict(first)
    foreign = ClientFiles(tmp_path)
    foreign.keep(0, snapshot(9), when=3)
    restored.load_state_dict(second)
    with pytest.raises(ValueError, match=r"not the model of client 0 .* give every fit one of its own"):
        restored.get(0)
    assert not list(tmp_path.rglob("*.part"))


def test_a_round_that_runs_again_replaces_the_file(tmp_path):
    files = ClientFiles(tmp_path)
    for value in (1, 2):
        files.keep(0, snapshot(value), when=3)
    assert torch.equal(files.get(0).params, snapshot(2).params)


def test_buffers_of_another_fit_are_noticed(tmp_path):
    files, foreign = ClientFiles(tmp_path), ClientFiles(tmp_path)
    files.keep(0, snapshot(1), when=3)
    foreign.keep(0, Snapshot(snapshot(1).params, snapshot(2).buffers), when=3)
    with pytest.raises(ValueError, match="not the model of client 0"):
        files.get(0)


def test_the_same_state_saved_again_costs_no_older_one(tmp_path):
    files = ClientFiles(tmp_path)
    files.keep(0, snapshot(1), when=1)
    first = files.state_dict()
    files.keep(0, snapshot(2), when=2)
    for _ in range(3):
        files.state_dict()
    files.load_state_dict(first)
    assert torch.equal(files.get(0).params, snapshot(1).params)


def test_the_checkpoint_that_was_resumed_from_stays_usable(tmp_path):
    files = ClientFiles(tmp_path)
    files.keep(0, snapshot(1), when=1)
    state = files.state_dict()
    resumed = ClientFiles(tmp_path)
    resumed.load_state_dict(state)
    resumed.keep(0, snapshot(2), when=2)
    again = ClientFiles(tmp_path)
    again.load_state_dict(state)
    assert torch.equal(again.get(0).params, snapshot(1).params)


def test_bfloat16_models_in_files(tmp_path):
    files = ClientFiles(tmp_path)
    model = Snapshot(torch.randn(5).bfloat16(), torch.empty(0, dtype=torch.uint8))
    files.keep(0, model, 0)
    assert torch.equal(files.get(0).params, model.params)
