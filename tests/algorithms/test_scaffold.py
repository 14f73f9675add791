# SPDX-License-Identifier: Apache-2.0
import copy

import lightning as L
import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows
from client_rounds import Net, Rounds, assign, by_rule, client_data, flat, lost, partial
from support import training_only
from torch import nn
from torch.utils.data import TensorDataset

import fl_lightning as fl
from fl_lightning.algorithms import SCAFFOLD, FedDyn, Federation, LocalWork
from fl_lightning.algorithms.scaffold import accumulated_steps
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import rule_state

ETA, ETA_G = 0.2, 0.8


def federate(data, weighting):
    """Algorithm 1 on vectors; clients take different numbers of steps."""
    module = Net(norm=False)
    x, sizes = flat(module), torch.tensor([float(sum(len(y) for _, y in own)) for own in data.values()]).double()
    c, c_i, path = torch.zeros_like(x), dict.fromkeys(data, torch.zeros_like(x)), []
    for t in range(6):
        dx, dc = {}, {}
        for i in partial(t):
            net, y = copy.deepcopy(module), x.clone()
            for batch in data[i]:
                assign(net, y)
                gradients = torch.autograd.grad(net.loss(batch), list(net.parameters()))
                y = y - ETA * (torch.cat([g.reshape(-1) for g in gradients]) - c_i[i] + c)
            dx[i], dc[i] = y - x, -c + (x - y) / (len(data[i]) * ETA)
        arrived = [i for i in partial(t) if i not in lost(t)]
        n = sizes if weighting == "samples" else torch.ones_like(sizes)
        for i in arrived:
            x = x + ETA_G * n[i] / n[arrived].sum() * dx[i]
            c = c + n[i] / n.sum() * dc[i]
            c_i[i] = c_i[i] + dc[i]
        path.append(x)
    return torch.stack(path)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_equals_algorithm_1_with_late_joiners_and_a_drop_out(weighting):
    data = client_data(seed=3)
    data[2], data[3] = data[2][:1], data[3][:2]
    rounds = {"lr": ETA, "module": Net(norm=False)}
    path, _ = by_rule(lambda: SCAFFOLD(ETA_G, weighting=weighting), data, **rounds)
    torch.testing.assert_close(path, federate(data, weighting), rtol=0, atol=1e-9)


class Linear(nn.Module):
    """Two tensors, of which the loss knows the first, with a constant gradient."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def loss(self, batch):
        return (self.first * torch.linspace(-1, 2, 6).view(2, 3)).sum()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_control_variate_is_the_mean_of_the_gradients_seen(momentum):
    """Whatever the momentum; parameters without a gradient stay as they are."""
    rule, data = SCAFFOLD(), client_data(clients=4, batches=7)
    run = Rounds(rule, rule.client_rule(), data, Linear(), 0.1, momentum)
    gradient = torch.cat([torch.linspace(-1, 2, 6), torch.zeros(2)]).double()
    for _ in range(3):  # with c and c_i in play from the second pass on
        run.round([3])
        torch.testing.assert_close(run.client.c_i[3][:6], gradient[:6])
        torch.testing.assert_close(run.client.c[:6], gradient[:6] / 4)
        assert not run.params[6:].any()
    rule_state.load_state_dict(run.client, {"c": torch.ones(8).double()})
    row, *_ = run.train(0)
    torch.testing.assert_close(row[:6], run.lr * accumulated_steps(7, momentum) * (gradient[:6] + 1))
    assert not row[6:].any()


def test_a_client_that_does_not_move_changes_nothing():
    rule = SCAFFOLD()
    for lr, batches in ((0.0, 3), (0.1, 0)):
        row, report, *_ = Rounds(rule, rule.client_rule(), client_data(batches=batches), Linear(), lr).train(0)
        assert not row.any()
        assert not report.companions["control"].any()


def test_needs_a_learning_rate_and_control_rows():
    client = SCAFFOLD().client_rule()
    assert client.needs.client_lr
    layout = ParamLayout.from_sizes([8])
    with pytest.raises(ValueError, match="client_lr"):
        client.end_client(LocalWork(0, 0, nn.Module(), layout, [], torch.zeros(8), 1, client_lr=None, steps=1))
    with pytest.raises(ValueError, match="control"):
        client.commit(make_cohort(random_rows(2, 72)))


@pytest.mark.parametrize(("method", "name"), [(SCAFFOLD, "c"), (FedDyn, "h")])
def test_restored_state_of_another_model_is_refused(method, name):
    client = method().client_rule()
    rule_state.load_state_dict(client, {name: torch.ones(5)})
    with pytest.raises(ValueError, match="8 numbers, found 5 in the checkpoint"):
        client.begin_fit(Federation(6, ParamLayout.from_sizes([8]), torch.device("cpu"), torch.float32))


@pytest.mark.parametrize(("steps", "momentum"), [(0, 0.0), (1, 0.9), (5, 0.0), (5, 0.5)])
def test_accumulated_steps(steps, momentum):
    weights = [sum(momentum**j for j in range(k)) for k in range(1, steps + 1)]
    assert accumulated_steps(steps, momentum) == pytest.approx(sum(weights))


class Centre(L.LightningModule):
    """One number, pulled towards the client's."""

    def __init__(self):
        super().__init__()
        self.at = nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return 0.5 * (self.at - batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


@pytest.mark.fit
@pytest.mark.parametrize(("weighting", "optimum", "clients_per_round"), [("uniform", 0.5, 2), ("samples", 0.1, 1)])
def test_clients_of_90_and_10_samples(weighting, optimum, clients_per_round):
    """Optima 0 and 1; three local steps, so that FedAvg drifts. One client per round: ``c`` knows all samples."""
    targets = torch.cat([torch.zeros(90), torch.ones(10)])
    parts = [torch.arange(90), torch.arange(90, 100)]
    data = fl.FederatedDataModule(TensorDataset(targets), parts, batch_size=100)
    rule = SCAFFOLD(server_lr=clients_per_round / 2, weighting=weighting)
    module = Centre()
    strategy = fl.FederatedStrategy(rule, clients_per_round=clients_per_round, local_epochs=3, seed=2)
    training_only(strategy, 60).fit(module, data)
    assert float(module.at.detach()) == pytest.approx(optimum, abs=0.005)
