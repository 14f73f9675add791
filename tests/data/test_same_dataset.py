# SPDX-License-Identifier: Apache-2.0
"""Data modules that validate on the dataset that they train on, as forecasting libraries do."""

import pytest
import torch
from support import blobs
from torch.utils.data import DataLoader, Dataset

import fl_lightning as fl
from fl_lightning.lightning.names import LightningDataModule


class Series(Dataset):
    """Windows of series are cut in ``training_step``; a sample is a series and has no label."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"series": torch.full((5,), float(index))}


class Forecasts(LightningDataModule):
    def __init__(self, dataset):
        super().__init__()
        self.dataset = dataset

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=2, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.dataset, batch_size=4)


@pytest.mark.parametrize(
    ("partition", "dataset"),
    [(fl.data.IID(3), Series()), (fl.data.Dirichlet(3, 0.5), blobs(40)), ([range(4), range(4, 12)], Series())],
)
def test_clients_are_validated_on_their_own_samples(partition, dataset):
    data = fl.FederatedDataModule(Forecasts(dataset), partition, seed=1)
    train, val = data.train_dataloader(), data.val_dataloader()
    assert len(train) == len(val) > 1
    for client in range(len(train)):
        assert torch.equal(train.indices(client), val.indices(client))
    assert val.batch_size == 4


def test_other_ways_to_evaluate_stay():
    shared = fl.FederatedDataModule(Forecasts(Series()), fl.data.IID(3), evaluation="shared").val_dataloader()
    assert shared.sizes.tolist() == [12, 12, 12]
    alone = fl.FederatedDataModule(Forecasts(Series()), fl.data.IID(3), evaluation="independent")
    train, val = alone.train_dataloader(), alone.val_dataloader()
    assert any(not torch.equal(train.indices(client), val.indices(client)) for client in range(3))
