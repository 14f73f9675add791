# SPDX-License-Identifier: Apache-2.0
"""The papers' two shapes, and the hand-written loop that trains them. Needs torch alone: peers run it elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEED = 0
CLASSES = 10


@dataclass(frozen=True)
class Shape:
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
        """Gaussian inputs ``[N, ...]`` with the labels ``[N]`` of a linear teacher; the same on every call."""
        generator = torch.Generator().manual_seed(SEED)
        x = torch.randn(self.clients * self.samples, *self.inputs, generator=generator)
        flat = x.flatten(1)
        return x, (flat @ torch.randn(flat.shape[1], CLASSES, generator=generator)).argmax(1)

    def initial(self) -> nn.Module:
        """The network that everybody starts from; the global generator is as before."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.network()


def mlp(inputs: int, hidden: int) -> nn.Module:
    """Two hidden layers with ReLU, for flat inputs."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
    )


def _w1() -> nn.Module:
    return mlp(784, 200)


def _w2() -> nn.Module:
    from benchmarks.papers.architectures import CifarCNN

    return CifarCNN()


def _linear() -> nn.Module:
    return nn.Linear(60, CLASSES)


def _tiny() -> nn.Module:
    return mlp(8, 4)


W1 = Shape("W1", "MLP 784-200-200-10, Fashion-MNIST's shape", _w1, (784,), 100, 600, 10, 50, 0.05)
W2 = Shape("W2", "CNN 64-64-384-192-10, CIFAR-10's shape", _w2, (3, 32, 32), 100, 500, 10, 50, 0.05)
TINY = Shape("tiny", "MLP 8-4-4-10, tries the program only", _tiny, (8,), 6, 20, 3, 10, 0.05)
W1_10 = Shape("W1-10", "W1 with batches of 10", _w1, (784,), 100, 600, 10, 10, 0.05)
LINEAR = Shape("linear", "logistic regression 60-10, batches of 10", _linear, (60,), 100, 600, 10, 10, 0.05)
SHAPES = {shape.name: shape for shape in (W1, W1_10, LINEAR, W2, TINY)}


class HandWritten:
    """Federated averaging as one writes it for a single experiment on tensors in memory.

    Args:
        shape: what it trains.
        x: inputs of all clients.
        y: their labels.
        clip: norm that gradients are clipped to; ``None``: they are not.
        foreach: step with one ``torch._foreach_add_`` in place of ``torch.optim.SGD``.

    Attributes:
        model: the network; between rounds it holds what the last client left.
        weights: the global parameters.
        steps: local steps so far.
        step_norm: Euclidean norm of the last change of the global parameters.
    """

    def __init__(self, shape: Shape, x: Tensor, y: Tensor, clip: float | None = None, foreach: bool = False) -> None:
        self.shape, self.x, self.y, self.clip, self.foreach = shape, x, y, clip, foreach
        self.model = shape.initial().to(x.device)
        self.parameters = list(self.model.parameters())
        self.weights = [p.detach().clone() for p in self.parameters]
        self.steps, self.step_norm = 0, 0.0

    def __call__(self) -> None:
        """One round."""
        self.move(self.updates(self.cohort()))

    def cohort(self) -> list[int]:
        """Draws the clients of a round."""
        chosen: list[int] = torch.randperm(self.shape.clients)[: self.shape.per_round].tolist()
        return chosen

    def updates(self, clients: Sequence[int]) -> list[Tensor]:
        """Trains these clients of a round; their share of its mean update."""
        size, parameters, weights = self.shape.samples, self.parameters, self.weights
        update = [torch.zeros_like(w) for w in weights]
        for client in clients:
            with torch.no_grad():
                for p, w in zip(parameters, weights, strict=True):
                    p.copy_(w)
            order = (client * size + torch.randperm(size)).to(self.x.device)
            self.steps += train(self.model, self.shape, self.x, self.y, order, self.clip, self.foreach)
            with torch.no_grad():
                for u, p, w in zip(update, parameters, weights, strict=True):
                    u.add_(p - w, alpha=1 / self.shape.per_round)
        return update

    def move(self, update: Sequence[Tensor]) -> None:
        """Changes the global parameters."""
        for w, u in zip(self.weights, update, strict=True):
            w.add_(u)
        self.step_norm = float(torch.cat([u.flatten() for u in update]).norm())


def train(
    model: nn.Module,
    shape: Shape,
    x: Tensor,
    y: Tensor,
    order: Tensor,
    clip: float | None = None,
    foreach: bool = False,
) -> int:
    """One client's epoch over the samples ``order``, batch by batch; returns the number of steps."""
    optimizer = Foreach(model, shape.lr) if foreach else torch.optim.SGD(model.parameters(), lr=shape.lr)
    batches = order.split(shape.batch)
    for batch in batches:
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return len(batches)


class Foreach:
    """Plain SGD in one call for all parameters, as somebody in a hurry writes it."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.parameters, self.lr = list(model.parameters()), lr

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """Takes one step."""
        with torch.no_grad():
            torch._foreach_add_(self.parameters, [p.grad for p in self.parameters], alpha=-self.lr)
