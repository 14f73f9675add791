# SPDX-License-Identifier: Apache-2.0
import copy

import torch
from client_rounds import Net, Rounds, assign, by_rule, client_data, descend, flat, lost, partial

from fl_lightning.algorithms import FedDyn, FedHEAL

ALPHA, LR = 0.3, 0.2


def federate(data):
    """Algorithm 1 with deep copies and autograd of the written objective."""
    module = Net(norm=False)
    n = flat(module).numel()
    h, duals, w = torch.zeros(n).double(), {i: torch.zeros(n).double() for i in data}, flat(module)
    path = []
    for t in range(6):
        models = {}
        for i in partial(t):
            local = copy.deepcopy(module)
            assign(local, w)
            for batch in data[i]:
                theta = torch.cat([p.reshape(-1) for p in local.parameters()])
                objective = local.loss(batch) - duals[i] @ theta + ALPHA / 2 * (theta - w).square().sum()
                descend(local, objective, LR)
            models[i] = flat(local)
        arrived = [i for i in partial(t) if i not in lost(t)]
        for i in arrived:
            duals[i] = duals[i] - ALPHA * (models[i] - w)
        h = h - ALPHA / len(data) * sum(models[i] - w for i in arrived)
        w = sum(models[i] for i in arrived) / len(arrived) - h / ALPHA
        path.append(w)
    return torch.stack(path), h, duals


def test_equals_algorithm_1_with_late_joiners_and_a_drop_out():
    data = client_data(seed=3)
    expected, h, duals = federate(data)
    path, run = by_rule(lambda: FedDyn(ALPHA), data, module=Net(norm=False), lr=LR)
    client = run.client
    torch.testing.assert_close(path, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(client.h * ALPHA, h, rtol=0, atol=1e-10)
    torch.testing.assert_close(h, sum(duals.values()) / len(data))  # whoever took part
    for i, held in client.h_i.items():
        torch.testing.assert_close(held * ALPHA, duals[i], rtol=0, atol=1e-10)


def test_server_part_is_not_masked_by_fedheal():
    """``h`` takes the updates as they are; only the mean is FedHEAL's."""
    data, client = client_data(), FedDyn(ALPHA).client_rule()
    run = Rounds(FedHEAL(), client, data, Net(norm=False), LR)
    seen = torch.zeros_like(run.params)
    alone = FedHEAL()
    for _ in range(4):
        before = run.params
        cohort, step = run.round([0, 1, 2, 3])
        seen += cohort.updates.rows.mean(0)
        torch.testing.assert_close(step, alone.aggregate(cohort) + seen, rtol=0, atol=1e-12)
        torch.testing.assert_close(run.params, before - step)
    assert alone.report.scalars["kept_share"] < 1
