# SPDX-License-Identifier: Apache-2.0
import copy
from types import SimpleNamespace

import pytest
import torch
from algorithm_cohorts import COLUMNS, make_cohort, random_rows
from client_rounds import Net, Rounds, client_data

import fl_lightning as fl
from fl_lightning.algorithms import EAGLE, FedAvg


@pytest.mark.parametrize(("lam", "clip"), [(0.3, False), (5.0, False), (0.02, True)])
def test_full_gradients_descend_the_papers_objective(lam, clip):
    """On quadratics, by autograd; with a small penalty no weight is negative, and clipping changes nothing."""
    dice = torch.Generator().manual_seed(1)
    curves, centres = (torch.rand(4, COLUMNS, generator=dice, dtype=torch.float64) for _ in range(2))
    best = torch.rand(4, generator=dice, dtype=torch.float64)  # what clients cannot get below
    params = torch.rand(COLUMNS, generator=dice, dtype=torch.float64).requires_grad_()
    losses = (curves * (params - centres).square()).sum(1) + best
    rows = 0.1 * torch.stack([torch.autograd.grad(loss, params, retain_graph=True)[0] for loss in losses])
    objective = losses.mean() + lam * (losses - best).var(correction=0)
    expected = 0.1 * torch.autograd.grad(objective, params)[0]

    known, told = EAGLE(lam, best.tolist(), clip=clip), EAGLE(lam, clip=clip)
    cohort = make_cohort(rows, losses.detach(), params=params.detach(), extras={"lowest_loss": best})
    for rule in (known, told):
        torch.testing.assert_close(rule.aggregate(cohort), expected)
        assert not rule.report.flagged


def test_negative_weights_become_0():
    rule = EAGLE(1.0, [0.5, 0.5, 1.0])
    rule.aggregate(make_cohort(random_rows(3, 1), [3.5, 2.5, 1.0]))  # gaps 3, 2 and 0: 1 + 2 (8/3, 2/3, -10/3) / 2
    torch.testing.assert_close(rule.report.weights, torch.tensor([11.0, 5.0, 0.0]).double() / 16)
    assert rule.report.scalars["loss_gap_std"] == pytest.approx((14 / 9) ** 0.5)


def lowest_by_hand(module, batches, lr, epochs):
    """Passes of SGD on a copy, with its loss in evaluation mode after each, until one is no lower."""
    net, found = copy.deepcopy(module), []
    while True:
        with torch.no_grad():
            net.eval()
            total = sum(float(net.loss(batch)) * len(batch[1]) for batch in batches)
            found.append(total / sum(len(y) for _, y in batches))
        if len(found) > epochs or (len(found) > 1 and found[-1] >= found[-2]):
            return min(found)
        net.train()
        optimizer = torch.optim.SGD(net.parameters(), lr)
        for batch in batches:
            optimizer.zero_grad()
            net.loss(batch).backward()
            optimizer.step()


@pytest.mark.parametrize(("lr", "epochs"), [(None, 4), (0.05, 1), (20.0, 5)])
def test_clients_find_what_they_reach_alone_once(lr, epochs):
    """With BatchNorm, and with a rate at which training alone ends early. The update is FedAvg's."""
    data, server = client_data(seed=5), EAGLE(alone_epochs=epochs, alone_lr=lr)
    run = Rounds(server, server.client_rule(), data)
    plain = Rounds(FedAvg(), fl.algorithms.ClientRule(), data)
    row, report, _, after = run.train(1)
    expected, _, _, buffers = plain.train(1)
    assert torch.equal(row, expected)
    assert all(torch.equal(after[name], buffers[name]) for name in buffers)
    assert report.extras["lowest_loss"].item() == pytest.approx(lowest_by_hand(Net(), data[1], lr or run.lr, epochs))
    server.client_rule().commit(make_cohort(random_rows(1, 1), ids=[1], extras={"lowest_loss": torch.tensor([7.0])}))
    assert run.train(1)[1].extras["lowest_loss"] == 7


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="alone_lr of EAGLE must be left out with best_losses"):
        EAGLE(best_losses=[0.1], alone_lr=0.1)
    with pytest.raises(ValueError, match="best_losses of EAGLE must be one for each of 6 clients, found 2"):
        EAGLE(best_losses=[0.1, 0.2]).begin_fit(SimpleNamespace(num_clients=6))
