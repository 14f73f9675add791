# SPDX-License-Identifier: Apache-2.0
"""Use 2: a plain nn.Module and a dataset, without a LightningModule or a LightningDataModule of one's own."""

from __future__ import annotations

from functools import partial

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import fl_lightning as fl


def main(rounds: int = 20) -> fl.EvaluationRecord:
    """Trains with SCAFFOLD over ten owners; returns every owner's validation values."""
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train, val = random_split(dataset, [0.7, 0.3], generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = fl.ClientModule(net, optimizer=partial(torch.optim.SGD, lr=0.1), num_classes=10)
    data = fl.FederatedDataModule(train, fl.data.Shards(num_clients=10, shards_per_client=2), val=val, batch_size=10)
    strategy = fl.FederatedStrategy(fl.algorithms.SCAFFOLD(), clients_per_round=0.5, local_epochs=1)
    L.Trainer(max_epochs=rounds, strategy=strategy, accelerator="cpu", logger=False).fit(model, data)
    assert strategy.last_evaluation is not None
    print(fl.callbacks.format_client_table(strategy.last_evaluation))
    return strategy.last_evaluation


if __name__ == "__main__":
    main()
