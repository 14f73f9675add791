# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows
from client_rounds import Net, Rounds, assign, client_data, flat

from fl_lightning.algorithms import FedAvg, FedProx


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
    rule, data = FedProx(mu), client_data(clients=1, batches=6)
    run, module = Rounds(rule, rule.client_rule(), data), Net()
    row, *_ = run.train(0)
    theta = w = flat(module)
    for batch in data[0]:
        gradients = torch.autograd.grad(module.loss(batch), list(module.parameters()))
        w = w - 0.2 * (torch.cat([g.reshape(-1) for g in gradients]) + mu * (w - theta))
        assign(module, w)
    torch.testing.assert_close(row, theta - w, rtol=1e-12, atol=1e-12)
