# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N806 (letters as in the paper)
import lightning as L
import numpy as np
import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows, train_locally
from support import training_only
from torch import nn
from torch.utils.data import TensorDataset

import fl_lightning as fl
from fl_lightning.algorithms import SCAFFOLD, Federation, LocalWork
from fl_lightning.algorithms.scaffold import accumulated_steps
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import rule_state
from fl_lightning.core.updates import UpdateMatrix

N, SIZE = 6, 8


def problems(seed=71):
    """One ill-conditioned quadratic ``(w - b)' A (w - b) / 2`` per client."""
    generator = np.random.default_rng(seed)
    A = []
    for _ in range(N):
        basis = np.linalg.qr(generator.normal(size=(SIZE, SIZE)))[0]
        A.append(basis @ np.diag(generator.uniform(0.3, 2.0, SIZE)) @ basis.T)
    return np.stack(A), generator.normal(size=(N, SIZE)) * 3


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self):
        return torch.cat([self.first.reshape(-1), self.second])


def run(rounds, sample, lr=0.2, steps=lambda i: 3 + i, rule=None, sizes=None):
    """Federates the quadratics through the rule; returns the trajectory of the global parameters."""
    A, b = (torch.from_numpy(x) for x in problems())
    rule = rule or SCAFFOLD()
    module = Weights()
    layout = ParamLayout.from_module(module)
    client = rule.client_rule()
    client.begin_fit(Federation(N, layout, torch.device("cpu"), torch.float64))
    params, path = torch.zeros(SIZE, dtype=torch.float64), []
    for t in range(rounds):
        ids = sample(t)
        rows, control = [], []
        for i in ids:
            loss = lambda net, step, i=i: 0.5 * (net() - b[i]) @ A[i] @ (net() - b[i])  # noqa: E731
            row, report = train_locally(client, module, layout, params, loss, i, lr, steps(i))
            rows.append(row)
            control.append(report.companions["control"])
        companions = {"control": UpdateMatrix(torch.stack(control), layout)}
        cohort = make_cohort(
            torch.stack(rows), ids=ids, when=t, layout=layout, companions=companions, num_clients=N, params=params,
            sizes=None if sizes is None else [sizes[i] for i in ids],
            num_samples=None if sizes is None else sum(sizes),
        )  # fmt: skip
        params = params - rule.aggregate(cohort)
        client.commit(cohort)
        path.append(params)
    return torch.stack(path)


def half(t):
    return [int(i) for i in np.random.default_rng(t).permutation(N)[:3]]


def test_equals_algorithm_1_written_with_vectors():
    A, b = problems()
    x, c, c_i, eta_g, eta = np.zeros(SIZE), np.zeros(SIZE), np.zeros((N, SIZE)), 0.8, 0.2
    path = run(8, half, rule=SCAFFOLD(eta_g))
    for t in range(8):
        dx, dc = [], []
        for i in half(t):
            y, K = x.copy(), 3 + i
            for _ in range(K):
                y = y - eta * (A[i] @ (y - b[i]) - c_i[i] + c)
            new = c_i[i] - c + (x - y) / (K * eta)
            dx.append(y - x)
            dc.append(new - c_i[i])
            c_i[i] = new
        x = x + eta_g * np.mean(dx, 0)
        c = c + np.sum(dc, 0) / N
        np.testing.assert_allclose(path[t].numpy(), x, rtol=0, atol=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_control_variate_is_the_mean_of_the_gradients_seen(momentum):
    """A client with constant gradient must report exactly that gradient, whatever the momentum."""
    gradient = torch.linspace(-1, 2, SIZE, dtype=torch.float64)
    module, rule = Weights(), SCAFFOLD()
    layout = ParamLayout.from_module(module)
    client = rule.client_rule()
    client.begin_fit(Federation(N, layout, torch.device("cpu"), torch.float64))
    loss = lambda net, step: net() @ gradient  # noqa: E731
    params = torch.zeros(SIZE, dtype=torch.float64)
    for _ in range(3):  # with c and c_i in play from the second pass on
        row, report = train_locally(client, module, layout, params, loss, 4, 0.1, 7, momentum)
        control = UpdateMatrix(report.companions["control"][None], layout)
        client.commit(make_cohort(row[None], ids=[4], layout=layout, companions={"control": control}, num_clients=N))
        torch.testing.assert_close(client.c_i[4], gradient)
        torch.testing.assert_close(client.c, gradient / N)


def test_weighted_by_samples_it_finds_the_optimum_of_all_samples():
    """The same as FedAvg aims at; weights in the step alone would leave the optimum of the uniform mean."""
    A, b = problems()
    sizes = [90, 10, 300, 5, 40, 1]
    p = np.array(sizes) / sum(sizes)
    optimum = torch.from_numpy(np.linalg.solve((p[:, None, None] * A).sum(0), p @ (A @ b[:, :, None])[:, :, 0]))
    found = run(150, half, lr=0.1, steps=lambda i: 3, rule=SCAFFOLD(weighting="samples"), sizes=sizes)[-1]
    assert (found - optimum).norm() < 1e-6
    assert (run(40, half, lr=0.1, steps=lambda i: 3, sizes=sizes)[-1] - optimum).norm() > 0.1


@pytest.mark.parametrize(("lr", "steps"), [(0.1, 0), (0.0, 3)])
def test_client_that_does_not_move_changes_nothing(lr, steps):
    module, client = Weights(), SCAFFOLD().client_rule()
    layout = ParamLayout.from_module(module)
    params = torch.ones(SIZE, dtype=torch.float64)
    client.begin_fit(Federation(N, layout, torch.device("cpu"), torch.float64))
    row, report = train_locally(client, module, layout, params, lambda net, step: net().sum(), 0, lr, steps)
    assert not row.any()
    assert not report.companions["control"].any()


def test_parameters_without_gradient_are_left_alone():
    module, client = Weights(), SCAFFOLD().client_rule()
    layout = ParamLayout.from_module(module)
    rule_state.load_state_dict(client, {"c": torch.ones(SIZE).double()})
    loss = lambda net, step: net.first.sum()  # noqa: E731
    row, _ = train_locally(client, module, layout, torch.zeros(SIZE, dtype=torch.float64), loss, 0, 0.5, 1)
    assert row.tolist() == [1.0] * 6 + [0.0] * 2  # 0.5 * (gradient 1 + correction 1)


def test_needs_a_learning_rate_and_control_rows():
    client, rows = SCAFFOLD().client_rule(), random_rows(2, 72)
    assert client.needs.client_lr
    layout = ParamLayout.from_sizes([SIZE])
    flat = torch.zeros(SIZE)
    work = LocalWork(0, 0, nn.Module(), layout, [], flat, 1, client_lr=None, steps=1)
    with pytest.raises(ValueError, match="client_lr"):
        client.end_client(work)
    with pytest.raises(ValueError, match="control"):
        client.commit(make_cohort(rows))


def test_restored_state_of_another_model_is_refused():
    client = SCAFFOLD().client_rule()
    rule_state.load_state_dict(client, {"c": torch.ones(5)})
    with pytest.raises(ValueError, match="8 numbers"):
        client.begin_fit(Federation(N, ParamLayout.from_sizes([8]), torch.device("cpu"), torch.float32))


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
