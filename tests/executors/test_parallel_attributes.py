# SPDX-License-Identifier: Apache-2.0
"""Worker processes and what modules and datasets have for attributes: looking at them must not fail."""

from array import array
from functools import partial

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from support import CLASSES, Classifier, blobs, fit, fresh, weights
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from worker_processes import FORKS, TWO

import fl_lightning as fl

pytestmark = FORKS


class Neither:
    """Has no truth value."""

    def __bool__(self):
        raise RuntimeError("neither true nor false")


class Weighted(Classifier):
    """Class weights in a plain attribute, as many people write them."""

    def __init__(self, **options):
        super().__init__(**options)
        self.class_weights = torch.linspace(0.5, 2, CLASSES)
        self.others = {"empty": torch.empty(0), "sparse": torch.eye(3).to_sparse()}
        self.array, self.empty, self.neither = np.zeros(3), torch.empty(0), Neither()
        self.sparse = torch.eye(3).to_sparse()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1], weight=self.class_weights)


def trained(executor, module=None, **options):
    """The strategy of a fit, and the weights it ends with."""
    module, strategy, _ = fit(module or fresh(Weighted), 2, executor=executor, clients_per_round=5, **options)
    return strategy, weights(module)


@pytest.mark.parametrize("policy", ["raise", "drop"])
def test_attributes_without_a_truth_value_or_a_memory_address_are_no_obstacle(policy):
    (strategy, found), (_, expected) = trained(TWO, on_client_error=policy), trained(None)
    assert strategy.executor_fallback is None
    assert not strategy.last_round.dropped
    assert torch.equal(found, expected)


def test_attributes_that_planned_steps_read_are_no_changes():
    (strategy, found), (_, expected) = (trained(executor, planned_steps=True) for executor in (TWO, None))
    assert strategy.executor_fallback is None
    assert strategy.last_round.planned_steps > 0
    assert torch.equal(found, expected)


def test_what_changes_in_a_sparse_attribute_is_noticed():
    class Growing(Weighted):
        def training_step(self, batch, batch_idx):
            self.sparse.mul_(2)
            return super().training_step(batch, batch_idx)

    assert trained(TWO, fresh(Growing))[0].executor_fallback == "Growing changes attribute 'sparse'"


@pytest.mark.parametrize("seen", [lambda: [0] * 600, lambda: dict.fromkeys(range(600), 0), lambda: np.zeros(60_000)])
def test_one_of_many_counts_is_noticed(seen):
    class Counting(Weighted):
        def training_step(self, batch, batch_idx):
            self.seen[300] += len(batch[0])
            return super().training_step(batch, batch_idx)

    modules = []
    for executor in (TWO, None):
        module = fresh(Counting)
        module.seen = seen()
        modules.append(module)
        strategy, _ = trained(executor, module)
        assert strategy.executor_fallback == (executor and "Counting changes attribute 'seen'")
    assert modules[0].seen[300] == modules[1].seen[300] > 0


class Slotted:
    """Has no dictionary, and keeps its number to itself."""

    __slots__ = ("__value",)

    def __init__(self):
        self.__value = 1.0

    def put(self, value):
        self.__value = value

    def get(self):
        return self.__value


class Settings(dict):
    """A dictionary with an attribute."""

    extra = 1.0


HOLDERS = {
    "slots": (Slotted, lambda held, value: held.put(value), lambda held: held.get()),
    "attributes of dictionaries": (
        Settings,
        lambda held, value: setattr(held, "extra", value),
        lambda held: held.extra,
    ),
    "partial": (
        lambda: partial(dict, value=[1.0]),
        lambda held, value: held.keywords["value"].__setitem__(0, value),
        lambda held: held()["value"][0],
    ),
    "array of objects": (
        lambda: np.array([[1.0], None], dtype=object),
        lambda held, value: held[0].__setitem__(0, value),
        lambda held: held[0][0],
    ),
    "array": (lambda: array("d", [1.0]), lambda held, value: held.__setitem__(0, value), lambda held: held[0]),
    "data of a tensor": (lambda: torch.ones(()), lambda held, value: held.data.fill_(value), lambda held: held),
    "numpy of a tensor": (lambda: torch.ones(()), lambda held, value: held.numpy().fill(value), lambda held: held),
}


class Holding(Weighted):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * HOLDERS[self.what][2](self.held)


class Puts(Callback):
    """Changes what the module holds between rounds."""

    def on_train_epoch_start(self, trainer, pl_module):
        HOLDERS[pl_module.what][1](pl_module.held, 2.0 - trainer.current_epoch)


@pytest.mark.parametrize("what", HOLDERS)
def test_what_changes_in_objects_between_rounds_is_noticed(what):
    found = []
    for executor in (TWO, None):
        module = fresh(Holding)
        module.what, module.held = what, HOLDERS[what][0]()
        strategy, weight = trained(executor, module, callbacks=[Puts()])
        assert strategy.executor_fallback is None
        found.append(weight)
    assert torch.equal(*found)


class Threshold(Weighted):
    """Reads a setting of a metric, which changes between rounds."""

    def __init__(self, **options):
        super().__init__(**options)
        self.accuracy = torchmetrics.Accuracy("binary", threshold=0.5)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.accuracy.threshold

    def on_train_epoch_end(self):
        self.accuracy.threshold = 0.25


def test_what_changes_in_the_settings_of_a_metric_is_noticed():
    (strategy, found), (_, expected) = trained(TWO, fresh(Threshold)), trained(None, fresh(Threshold))
    assert strategy.executor_fallback is None
    assert torch.equal(found, expected)


class Scale(nn.Module):
    """A transform with a setting."""

    factor = 1.0

    def forward(self, x):
        return x * self.factor


class Scaled(Dataset):
    """Has a module for a transform, as torchvision's are."""

    def __init__(self, samples):
        self.samples, self.transform = samples, nn.Sequential(nn.Identity(), nn.Sequential(Scale()))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        x, y = self.samples[index]
        return self.transform(x), y


class Taught(Weighted):
    """Learns from a module that is no submodule."""

    def __init__(self, **options):
        super().__init__(**options)
        self.teachers = [nn.Linear(12, CLASSES)]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + F.mse_loss(self(batch[0]), self.teachers[0](batch[0]).detach())


class Later(Callback):
    """Changes a transform and a teacher between rounds."""

    def on_train_epoch_start(self, trainer, pl_module):
        factor = 2.0 - trainer.current_epoch
        trainer.train_dataloader.dataset.transform[1][0].factor = factor
        nn.init.constant_(pl_module.teachers[0].weight, factor)


def test_modules_outside_the_module_may_change_between_rounds():
    found = []
    for executor in (TWO, None):
        data = fl.FederatedDataModule(Scaled(blobs(120)), fl.data.IID(6), batch_size=10)
        strategy, weight = trained(executor, fresh(Taught), data=data, callbacks=[Later()])
        assert strategy.executor_fallback is None
        found.append(weight)
    assert torch.equal(*found)


def test_a_module_elsewhere_that_training_changes_is_noticed():
    class Following(Taught):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                self.teachers[0].weight.mul_(0.9).add_(0.1)
            return super().training_step(batch, batch_idx)

    (strategy, found), (_, expected) = trained(TWO, fresh(Following)), trained(None, fresh(Following))
    assert strategy.executor_fallback == "Following changes attribute 'teachers'"
    assert torch.equal(found, expected)


def test_datasets_with_sparse_tensors():
    def data():
        nodes = blobs(120)
        nodes.graph = torch.eye(5).to_sparse()
        return fl.FederatedDataModule(nodes, fl.data.IID(6), batch_size=10)

    (strategy, found), (_, expected) = trained(TWO, data=data()), trained(None, data=data())
    assert strategy.executor_fallback is None
    assert torch.equal(found, expected)


@pytest.mark.parametrize("policy", ["raise", "drop"])
def test_an_error_between_the_processes_is_no_clients_error(monkeypatch, policy):
    def broken(gang):
        raise ArithmeticError("nothing can be sent")

    monkeypatch.setattr("fl_lightning.executors.parallel.runner.ParallelRunner._send_out", broken)
    (strategy, found), (_, expected) = trained(TWO, on_client_error=policy), trained(None)
    assert strategy.executor_fallback == "ArithmeticError between this process and its workers: nothing can be sent"
    assert not strategy.last_round.dropped
    assert torch.equal(found, expected)
