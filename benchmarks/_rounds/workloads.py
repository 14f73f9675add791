# SPDX-License-Identifier: Apache-2.0
"""What is trained: the papers' two shapes, as a Lightning project and as a hand-written loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fl_lightning as fl

SEED = 0


@dataclass(frozen=True)
class Workload:
    """Clients of equal size that train one network by plain SGD for one epoch per round.

    Attributes:
        name: short name.
        what: the shape in words.
        network: makes the network.
        inputs: shape of one sample.
        clients: registered clients.
        samples: of each client.
        per_round: clients sampled per round.
        batch: samples per local step.
        lr: of the clients.
    """

    name: str
    what: str
    network: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    clients: int
    samples: int
    per_round: int
    batch: int
    lr: float

    @property
    def steps(self) -> int:
        """Local steps of one round."""
        return self.per_round * -(-self.samples // self.batch)

    def data(self) -> tuple[Tensor, Tensor]:
        """Gaussian inputs ``[N, ...]`` with one of ten labels ``[N]``; the same on every call."""
        generator = torch.Generator().manual_seed(SEED)
        total = self.clients * self.samples
        x = torch.randn(total, *self.inputs, generator=generator)
        return x, torch.randint(0, 10, (total,), generator=generator)

    def federated(self, x: Tensor, y: Tensor) -> fl.FederatedDataModule:
        """Client ``i`` has the ``i``-th block of samples."""
        parts = list(torch.arange(len(y)).split(self.samples))
        return fl.FederatedDataModule(TensorDataset(x, y), parts, batch_size=self.batch)


def _w1() -> nn.Module:
    return fl.models.MLP()


def _w2() -> nn.Module:
    return fl.models.CifarCNN()


def _tiny() -> nn.Module:
    return fl.models.MLP(in_features=8, hidden=4)


W1 = Workload("W1", "MLP 784-200-200-10 on Fashion-MNIST's shape", _w1, (784,), 100, 600, 10, 50, 0.05)
W2 = Workload("W2", "CNN 64-64-384-192-10 on CIFAR-10's shape", _w2, (3, 32, 32), 100, 500, 10, 50, 0.05)
TINY = Workload("tiny", "MLP 8-4-4-10, tries the program only", _tiny, (8,), 6, 20, 3, 10, 0.05)
WORKLOADS = {workload.name: workload for workload in (W1, W2, TINY)}


class Classifier(L.LightningModule):
    """The network as a Lightning project has it.

    Args:
        workload: the network and its learning rate.
        logs: call ``self.log`` once per step.
    """

    def __init__(self, workload: Workload, logs: bool) -> None:
        super().__init__()
        self.net, self.lr, self.logs = workload.network(), workload.lr, logs

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy; logged once per step if asked for."""
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        if self.logs:
            self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class HandWritten:
    """Federated averaging as one writes it for a single experiment on tensors in memory.

    Attributes:
        steps: local steps so far.
        step_norm: Euclidean norm of the last change of the global parameters.
    """

    def __init__(self, workload: Workload, x: Tensor, y: Tensor) -> None:
        self.workload, self.x, self.y = workload, x, y
        self.model = workload.network()
        self.parameters = list(self.model.parameters())
        self.weights = [p.detach().clone() for p in self.parameters]
        self.steps, self.step_norm = 0, 0.0

    def __call__(self) -> None:
        """One round."""
        size, parameters, weights = self.workload.samples, self.parameters, self.weights
        chosen = torch.randperm(self.workload.clients)[: self.workload.per_round].tolist()
        update = [torch.zeros_like(w) for w in weights]
        for client in chosen:
            with torch.no_grad():
                for p, w in zip(parameters, weights, strict=True):
                    p.copy_(w)
            optimizer = torch.optim.SGD(parameters, lr=self.workload.lr)
            order = client * size + torch.randperm(size)
            for batch in order.split(self.workload.batch):
                loss = F.cross_entropy(self.model(self.x[batch]), self.y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.steps += 1
            with torch.no_grad():
                for u, p, w in zip(update, parameters, weights, strict=True):
                    u.add_(p - w, alpha=1 / len(chosen))
        for w, u in zip(weights, update, strict=True):
            w.add_(u)
        self.step_norm = float(torch.cat([u.flatten() for u in update]).norm())
