# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows, train_locally
from torch import nn

from fl_lightning.algorithms import FedAvg, FedProx
from fl_lightning.core.layout import ParamLayout


def test_weighs_by_samples_or_alike():
    rows, sizes = random_rows(3, 61), torch.tensor([10.0, 30.0, 60.0])
    rule = FedAvg()
    torch.testing.assert_close(
        rule.aggregate(make_cohort(rows, sizes=sizes)), 0.1 * rows[0] + 0.3 * rows[1] + 0.6 * rows[2]
    )
    assert rule.report.weights.tolist() == pytest.approx([0.1, 0.3, 0.6])
    torch.testing.assert_close(FedAvg("uniform").aggregate(make_cohort(rows, sizes=sizes)), rows.mean(0))
    torch.testing.assert_close(FedProx(weighting="uniform").aggregate(make_cohort(rows, sizes=sizes)), rows.mean(0))


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_proximal_term_equals_the_step_written_by_hand(mu):
    """w <- w - lr (g + mu (w - theta)); the anchor must reach every parameter and every step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    layout = ParamLayout.from_module(module)
    theta = layout.flatten(layout.parameters(module))
    data = torch.randn(6, 8, 5, dtype=torch.float64)
    loss = lambda net, step: net(data[step]).square().mean() + net(data[step]).mean()  # noqa: E731
    row, _ = train_locally(FedProx(mu).client_rule(), module, layout, theta, loss, 0, lr=0.2, steps=6)

    w = theta.clone()
    for step in range(6):
        for parameter, view in zip(layout.parameters(module), layout.views(w.clone()), strict=True):
            parameter.data = view
        gradient = layout.flatten(torch.autograd.grad(loss(module, step), layout.parameters(module)))
        w = w - 0.2 * (gradient + mu * (w - theta))
    torch.testing.assert_close(row, theta - w, rtol=1e-12, atol=1e-12)
