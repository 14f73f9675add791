# SPDX-License-Identifier: Apache-2.0
"""Datasets that return a whole batch for a list of indices, as scvi-tools reads sparse matrices."""

import pytest
import torch
from support import Classifier, blobs, fresh, quiet_trainer, weights
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, TensorDataset

import fl_lightning as fl
from fl_lightning.data import ClientLoaders, LoaderSettings
from fl_lightning.data.division import loader_settings


class Rows(Dataset):
    """Returns numpy arrays of all samples that it is asked for, and notes how it was asked."""

    def __init__(self, source):
        self.columns = [tensor.numpy() for tensor in source.tensors]
        self.targets = source.tensors[1]
        self.asked = []

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        self.asked.append(index)
        return {name: column[index] for name, column in zip("xy", self.columns, strict=True)}


class RowsLoader(DataLoader):
    """scvi-tools' AnnDataLoader in short."""

    def __init__(self, dataset, batch_size=10, shuffle=False, drop_last=False, **kwargs):
        order = RandomSampler(dataset) if shuffle else SequentialSampler(dataset)
        sampler = BatchSampler(order, batch_size=batch_size, drop_last=drop_last)
        super().__init__(dataset, sampler=sampler, batch_size=None, shuffle=False, **kwargs)


class TakesRows(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch["x"], batch["y"]), batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step((batch["x"], batch["y"]), batch_idx)


def divided(train, val):
    return fl.FederatedDataModule(train, fl.data.Dirichlet(6, 1.0), val=val, seed=0)


@pytest.mark.fit
@pytest.mark.parametrize(("workers", "shuffle"), [(0, False), (0, True), (1, True)])
def test_a_fit_is_that_of_the_samples_one_by_one(workers, shuffle):
    def trained(kind, loader, data):
        module, rounds = fresh(kind), 1 if workers else 3
        trainer = quiet_trainer(fl.FederatedStrategy(clients_per_round=3, seed=5), rounds)
        trainer.fit(module, divided(loader(data(blobs(240, 0)), 10, shuffle, num_workers=workers),
                                    loader(data(blobs(80, 1)), 10)))  # fmt: skip
        return weights(module), trainer.callback_metrics["val_acc"], trainer.strategy.last_evaluation

    found, expected = trained(TakesRows, RowsLoader, Rows), trained(Classifier, DataLoader, lambda data: data)
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]
    assert found[2].sizes.tolist() == expected[2].sizes.tolist()


def test_the_dataset_is_asked_for_batches():
    data = Rows(blobs(20))
    settings = loader_settings(RowsLoader(data, 4, drop_last=True))
    loaders = ClientLoaders(data, [range(10), range(10, 20)], settings=settings)
    batches = list(loaders.batches(1, seed=None))
    assert data.asked == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert [size for _, size in batches] == [4, 4]
    assert torch.equal(batches[0][0]["y"], data.targets[10:14])
    assert sum(size for _, size in loaders.batches(0, seed=None, batch_size=3, merge_single=True)) == 10


@pytest.mark.fit
def test_one_client_with_all_data_is_plain_lightning():
    def loader():
        return RowsLoader(Rows(blobs(64, 0)), 10)

    plain = fresh(TakesRows)
    quiet_trainer("auto", 2).fit(plain, loader())
    module = fresh(TakesRows)
    quiet_trainer(fl.FederatedStrategy(), 2).fit(module, fl.FederatedDataModule(loader(), fl.data.IID(1)))
    torch.testing.assert_close(weights(module), weights(plain), rtol=0, atol=1e-6)


def test_tensor_datasets_are_gathered_and_give_the_same():
    source = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20))
    parts = [range(7), range(7, 20)]
    settings = loader_settings(RowsLoader(source, 3, shuffle=True))
    fetched = ClientLoaders(source, parts, settings=settings)
    usual = ClientLoaders(source, parts, settings=LoaderSettings(3, shuffle=True))
    assert fetched.in_memory
    for (a, n), (b, m) in zip(fetched.batches(1, seed=3), usual.batches(1, seed=3), strict=True):
        assert n == m
        assert type(a) is type(b) is list
        assert all(torch.equal(u, v) for u, v in zip(a, b, strict=True))
