# SPDX-License-Identifier: Apache-2.0
"""Use 3: a server rule inside a training loop of one's own. No Trainer, no strategy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fl_lightning as fl


def local_update(net: nn.Module, x: Tensor, y: Tensor, layout: fl.ParamLayout) -> tuple[Tensor, float]:
    """One client: its loss at the model it received, then ten steps of SGD. Returns theta - theta_i, and the loss."""
    start = layout.flatten(layout.parameters(net))
    with torch.no_grad():
        loss = F.cross_entropy(net(x), y).item()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    update = start - layout.flatten(layout.parameters(net))
    write(net, layout, start)
    return update, loss


def write(net: nn.Module, layout: fl.ParamLayout, flat: Tensor) -> None:
    """Copies a flat vector into the module."""
    with torch.no_grad():
        for parameter, value in zip(layout.parameters(net), layout.views(flat), strict=True):
            parameter.copy_(value)


def main(rounds: int = 30) -> Tensor:
    """Three clients whose data pull in different directions; returns their final losses."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    centres = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])
    data = [(c + 0.5 * torch.randn(40, 2, generator=generator), torch.full((40,), i)) for i, c in enumerate(centres)]
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
    layout = fl.ParamLayout.from_module(net)
    rule = fl.algorithms.FedLF()
    theta, losses = layout.flatten(layout.parameters(net)), torch.zeros(3)
    for index in range(rounds):
        updates, values = zip(*(local_update(net, x, y, layout) for x, y in data), strict=True)
        losses = torch.tensor(values)
        cohort = fl.Cohort(
            params=theta,
            updates=fl.UpdateMatrix(torch.stack(updates), layout),
            losses=losses,
            sizes=torch.tensor([len(y) for _, y in data]),
            client_ids=(0, 1, 2),
            round=index,
        )
        step = rule.aggregate(cohort)
        theta = theta - step
        write(net, layout, theta)
        if index % 10 == 0:
            conflicts = int((cohort.updates.dots(step).sum(0) < 0).sum())
            print(f"round {index:2d}  losses {[round(v, 3) for v in values]}  clients in conflict {conflicts}")
    print(f"final losses {[round(float(v), 3) for v in losses]}")
    return losses


if __name__ == "__main__":
    main()
