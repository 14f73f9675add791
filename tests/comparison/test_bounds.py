# SPDX-License-Identifier: Apache-2.0
"""The two bounds, against plain Lightning training on the same samples."""

from functools import partial

import lightning as L
import pytest
import torch
from support import Classifier, blobs
from torch import nn
from torch.utils.data import DataLoader, Subset

import fl_lightning as fl
from fl_lightning.report.conclusion import LOCAL, POOLED

ROUNDS, EPOCHS, BATCH, RATE = 3, 2, 7, 0.05


class InOrder(L.LightningDataModule):
    """Nothing is shuffled, so that batches are the same wherever they are made."""

    def _loader(self, seed, samples):
        return DataLoader(blobs(samples, seed), batch_size=BATCH)

    def train_dataloader(self):
        return self._loader(0, 60)

    def val_dataloader(self):
        return self._loader(1, 40)

    def test_dataloader(self):
        return self._loader(2, 40)


class Momentum(Classifier):
    """The optimizer has a memory, which has to last over the rounds."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr=lr, momentum=0.9)


def federated():
    return fl.FederatedDataModule(InOrder(), fl.data.Dirichlet(3, 0.5), seed=4)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    return fl.compare(
        Momentum, federated(), {"FedAvg": fl.FederatedStrategy(local_epochs=EPOCHS)},
        trainer=partial(L.Trainer, max_epochs=ROUNDS, accelerator="cpu", logger=False),
        folder=tmp_path_factory.mktemp("comparison"), learning_rates=[RATE], seeds=[5],
    )  # fmt: skip


def values(compared, method, metric="test_loss"):
    (record,) = [record for run, record in compared.results.items() if run.method == method]
    return record.last_values("test").values[metric]


def trained(indices):
    """Plain Lightning, on some samples of the training data."""
    torch.manual_seed(5)
    module = Momentum(lr=RATE)
    trainer = L.Trainer(
        max_epochs=ROUNDS * EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Subset(blobs(60, 0), indices.tolist()), batch_size=BATCH))
    return module.eval()


def losses(module, loaders, client):
    x, y = (tensor[loaders.indices(client)] for tensor in blobs(40, 2).tensors)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(module(x), y))


def test_pooled_is_plain_training_on_all_data(compared):
    data = federated()
    train, test = data.train_dataloader(), data.test_dataloader()
    module = trained(torch.cat([train.indices(client) for client in range(3)]).sort().values)
    assert values(compared, POOLED) == pytest.approx([losses(module, test, client) for client in range(3)], rel=1e-4)


def test_local_only_is_plain_training_on_each_clients_data(compared):
    data = federated()
    train, test = data.train_dataloader(), data.test_dataloader()
    expected = [losses(trained(train.indices(client)), test, client) for client in range(3)]
    assert values(compared, LOCAL) == pytest.approx(expected, rel=1e-4)
    assert len({round(value, 6) for value in expected}) == 3


def test_records_of_the_bounds_have_the_clients_of_the_methods(compared):
    records = {run.method: record for run, record in compared.results.items()}
    for method in (LOCAL, POOLED):
        assert records[method].client_names == records["FedAvg"].client_names
        assert records[method].client_sizes == records["FedAvg"].client_sizes
        assert records[method].last_values("test").client_ids == (0, 1, 2)
        assert [values.round for values in records[method].evaluations if values.stage == "val"] == [1, 2, 3]
        assert records[method].rounds.round == (0, 1, 2)
