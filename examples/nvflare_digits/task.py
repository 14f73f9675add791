# SPDX-License-Identifier: Apache-2.0
"""What server, sites and simulation share: the model, the method, and who has which digits."""

from __future__ import annotations

import lightning as L
import torch
from digits import DigitClassifier, Digits
from torch.utils.data import DataLoader, Subset

import fl_lightning as fl

SITES = ["site-1", "site-2", "site-3"]
ROUNDS = 5
STRATEGY = fl.FederatedStrategy(fl.algorithms.FedLF())


def model() -> DigitClassifier:
    torch.manual_seed(0)
    return DigitClassifier()


def all_digits() -> fl.FederatedDataModule:
    """The digits of all sites. A hospital would have its own LightningDataModule instead, and nobody else's data."""
    return fl.FederatedDataModule(Digits(), fl.data.Dirichlet(len(SITES), alpha=0.3))


def server() -> fl.FederatedServer:
    """What the controller runs."""
    return fl.FederatedServer(model(), STRATEGY, len(SITES))


def client(client_id: int) -> fl.FederatedClient:
    """What a site runs, with its own digits alone."""
    loaders = all_digits().train_dataloader()
    mine = Subset(loaders.dataset, loaders.indices(client_id).tolist())
    data = DataLoader(mine, loaders.batch_size, shuffle=True)
    return fl.FederatedClient(model(), data, STRATEGY, client_id, len(SITES), trainer={"accelerator": "cpu"})


def simulated() -> dict[str, torch.Tensor]:
    """The weights after the same rounds in a Trainer."""
    module = model()
    trainer = L.Trainer(
        max_epochs=ROUNDS, accelerator="cpu", strategy=STRATEGY, logger=False, enable_checkpointing=False
    )
    trainer.fit(module, all_digits())
    return module.state_dict()
