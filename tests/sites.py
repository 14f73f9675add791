# SPDX-License-Identifier: Apache-2.0
"""Sites with names, which join and leave."""

import torch
from support import Blobs, blobs
from torch.utils.data import DataLoader, TensorDataset

import fl_lightning as fl


class Sites(Blobs):
    """Every site has samples of its own, the same wherever it takes part."""

    def __init__(self, names, more=0):
        super().__init__(batch_size=6)
        self.names, self.more = names, more

    def train_dataloader(self):
        held = [blobs(12 + 3 * (ord(name) - ord("a")) + self.more, seed=ord(name)).tensors for name in self.names]
        self.keys = [name for name, (x, _) in zip(self.names, held, strict=True) for _ in x]
        return DataLoader(TensorDataset(*map(torch.cat, zip(*held, strict=True))), batch_size=6, shuffle=True)


def of(names, **options):
    sites = Sites(names, **options)
    sites.train_dataloader()
    return fl.FederatedDataModule(sites, fl.data.ByKey({"train": sites.keys}), seed=0)
