# SPDX-License-Identifier: Apache-2.0
"""Datasets with random generators of their own give the same bits in every executor, and in every run of one seed."""

import random

import numpy as np
import pytest
import torch
from support import Blobs, blobs, federated_blobs, fit, fresh, quiet_trainer, weights
from torch.utils.data import DataLoader, Dataset, Subset, default_collate
from worker_processes import FORKS, HERE, TWO

import fl_lightning as fl
from fl_lightning.lightning.module.generators import generators_in, seeded

pytestmark = FORKS

EVERYWHERE = np.random.default_rng(5)


class Base(Dataset):
    def __init__(self):
        self.data = blobs(60)
        self.rng = self.generator()

    def __len__(self):
        return 60

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + 0.3 * torch.as_tensor(self.noise(), dtype=torch.float32), y

    def generator(self):
        return None


class Numpy(Base):
    def generator(self):
        return np.random.default_rng(1)

    def noise(self):
        return self.rng.normal(size=12)


class Legacy(Numpy):
    def generator(self):
        return np.random.RandomState(1)


class Torch(Base):
    def generator(self):
        return torch.Generator().manual_seed(3)

    def noise(self):
        return torch.randn(12, generator=self.rng)


class Python(Base):
    def generator(self):
        return random.Random(2)

    def noise(self):
        return self.rng.gauss(0, 1)


class Unseeded(Numpy):
    def generator(self):
        return np.random.default_rng()


class InTransforms(Base):
    """Behind a list of functions, one of them with a closure."""

    def generator(self):
        rng = np.random.default_rng(4)

        class Shift:
            __slots__ = ("draws",)

            def __call__(self):
                return self.draws.random()

        shift = Shift()
        shift.draws = random.Random(3)
        return {"transforms": [lambda: rng.normal(size=12), shift]}

    def noise(self):
        one, other = self.rng["transforms"]
        return one() + other()


class OfTheFile(Base):
    def noise(self):
        return EVERYWHERE.normal(size=12)


class Data(Blobs):
    def __init__(self, dataset, **options):
        super().__init__()
        self.dataset, self.options = dataset, options

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=5, shuffle=True, **self.options)


def trained(dataset, executor, **options):
    """The weights that a fit ends with, in fewer clients a round than there are."""
    module, data = fresh(), fl.FederatedDataModule(Data(dataset, **options), fl.data.Dirichlet(6, 1.0), seed=0)
    strategy = fl.FederatedStrategy(clients_per_round=4, seed=5, executor=executor)
    quiet_trainer(strategy, 3, limit_val_batches=0).fit(module, data)
    assert strategy.executor_fallback is None
    return weights(module)


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in (Legacy, Torch, Python, Unseeded, OfTheFile)]


@pytest.mark.parametrize("kind", [Numpy, InTransforms, *SLOW])
def test_generators_of_datasets(kind):
    other = TWO if kind is InTransforms else HERE  # requests cannot take closures along
    runs = [trained(kind(), executor) for executor in (None, fl.executors.Parallel(3), other)]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_generators_behind_subsets_and_in_collate_functions():
    def collate(batch, rng=np.random.default_rng(7)):  # noqa: B008
        return default_collate([(x + float(rng.normal()), y) for x, y in batch])

    runs = [trained(Subset(Numpy(), range(50)), executor, collate_fn=collate) for executor in (None, TWO)]
    assert torch.equal(*runs)


def test_noise_differs_between_clients_and_rounds_and_seeds():
    rng = np.random.default_rng(1)
    drawn = []
    for parts in ((0, "client", 0, 0), (0, "client", 0, 1), (0, "client", 1, 0), (1, "client", 0, 0)):
        with seeded([rng], *parts):
            drawn.append(rng.normal())
    assert len(set(drawn)) == 4
    assert rng.normal() == np.random.default_rng(1).normal()  # its own state has come back


def test_what_is_found_and_what_is_not():
    own = np.random.default_rng(0)
    found = generators_in({"a": [own, own, np.random, random, torch.default_generator, random.SystemRandom()]}, own)
    assert found == [own]


def test_data_without_code_of_their_own_are_not_searched(monkeypatch):
    monkeypatch.setattr("fl_lightning.clients.client_runner.generators_in", lambda *roots: pytest.fail("searched"))
    fit(fresh(), 1, data=federated_blobs())
