# SPDX-License-Identifier: Apache-2.0
"""A suite of the leaderboard on a little noise."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import fl_lightning as fl
from benchmarks.leaderboard.learners import Learner
from benchmarks.leaderboard.methods import REFERENCE, UNIFORM, all_methods
from benchmarks.leaderboard.suites import Suite

METHODS = (REFERENCE, UNIFORM, "FedLF")


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def blobs(size, seed):
    labels = torch.arange(size) % 3
    noise = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(noise + 2 * torch.eye(6)[labels], labels)


def federate(root):
    return fl.FederatedDataModule(
        blobs(180, 0), fl.data.Dirichlet(4, 1.0), test=blobs(90, 1), batch_size=10, holdout=1 / 6
    )


def methods():
    every = all_methods(3, 2)
    return {name: every[name] for name in METHODS}


class Small(Learner):
    def __init__(self, network, rounds, lr):
        if lr == 1.0:
            raise ValueError("too fast")
        super().__init__(network, rounds, lr, 3)


TINY = Suite("tiny", "A little noise", 2, Small, network, federate, methods, "four clients", (0.03, 0.1, 1.0))
