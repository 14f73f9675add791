# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows
from client_rounds import work_of
from scipy.optimize import linprog
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import fl_lightning as fl
from fl_lightning.algorithms import FA
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import rule_state

BASES = torch.tensor([[0.0, 0.0], [2.0, 0.0], [-1.0, 1.0]], dtype=torch.float64)


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1, dtype=torch.float64)

    def federated_groups(self, batch):
        x, y, a = batch
        return self.net(x).squeeze(1), y, a


def people(count, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, generator=draw, dtype=torch.float64)
    return x, *(torch.randint(0, 2, (count,), generator=draw) for _ in range(2))


def kernels(x, sigma=1.0, bases=BASES):
    return torch.tensor([[np.exp(-float((p - b) @ (p - b)) / (2 * sigma**2)) for b in bases] for p in x])


def run(rule, data, batch=1000):
    """One client's pass; returns the terms of its batches and what it reports."""
    torch.manual_seed(0)
    module = Judge()
    work = work_of(module, len(data[0]), 0.1)
    client = rule.client_rule()
    client.begin_client(work)
    assert client.shape_loss(work, torch.tensor(3.0)) == 0
    parts = zip(*(column.split(batch) for column in data), strict=True)
    terms = [client.loss_term(work, part, index) for index, part in enumerate(parts)]
    return module, terms, client.end_client(work)


def test_first_term_is_the_loss_with_a_penalty_on_covariance():
    data = people(50, 1)
    module, (term,), _ = run(FA(BASES, sigma=1.0, tau=0.01, penalty=3.0), data)
    x, y, a = data
    z = module.net(x).squeeze(1)
    covariance = ((a - a.double().mean()) * z).mean()
    expected = binary_cross_entropy_with_logits(z, y.double()) + 3 * (covariance.abs() - 0.01).clamp_min(0)
    assert float(covariance.detach().abs()) > 0.01
    torch.testing.assert_close(term, expected)
    for one, two in zip(
        torch.autograd.grad(term, module.parameters()), torch.autograd.grad(expected, module.parameters()), strict=True
    ):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize(("batch", "offset"), [(7, 0.0), (1000, 0.0), (1000, 1e8)])
def test_reports_are_plain_sums_over_samples(batch, offset):
    x, y, a = people(40, 2)
    x, bases = x + offset, BASES + offset
    module, _, report = run(FA(bases, sigma=0.7), (x, y, a), batch)
    z = module.net(x).squeeze(1).detach()
    losses, k = binary_cross_entropy_with_logits(z, y.double(), reduction="none"), kernels(x, 0.7, bases)
    expected = torch.stack([(k * v[:, None]).sum(0) for v in (torch.ones(40), losses, z, a * z)])
    torch.testing.assert_close(report.extras["kernel_sums"], expected, rtol=1e-10, atol=1e-12)
    assert report.extras["group_counts"].tolist() == [40, float(a.sum())]


def committed(rule, clients):
    reports = [run(rule, data)[2].extras for data in clients]
    extras = {name: torch.stack([report[name] for report in reports]) for name in reports[0]}
    rule.client_rule().commit(make_cohort(random_rows(len(clients), 1), extras=extras))
    return extras


GROUPS = {"given": lambda a: a, "exchanged": lambda a: 1 - a, "unequal": lambda a: a * (torch.arange(len(a)) % 3 == 0)}


@pytest.mark.filterwarnings("ignore:FA found no weights")
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("tau", "bound"), [(0.02, 5.0), (10.0, 5.0), (10.0, 1.3), (0.0, 20.0)])
def test_the_adversary_is_that_of_an_independent_solver(tau, bound, groups):
    clients = [(x, y, GROUPS[groups](a)) for x, y, a in (people(60, 3), people(90, 4))]
    rule = FA(BASES, sigma=1.0, tau=tau, bound=bound)
    committed(rule, clients)
    client = rule.client_rule()
    torch.manual_seed(0)
    module = Judge()
    x, y, a = (torch.cat(parts) for parts in zip(*clients, strict=True))
    z = module.net(x).squeeze(1).detach()
    losses, k = binary_cross_entropy_with_logits(z, y.double(), reduction="none"), kernels(x)
    mass, gain = k.mean(0), (k * losses[:, None]).mean(0)
    lean = (k * ((a - a.double().mean()) * z)[:, None]).mean(0)
    among = kernels(BASES)
    found = linprog(
        -gain.numpy(),
        A_ub=np.vstack([lean, -lean, among]),
        b_ub=[tau, tau, *[bound] * 3],
        A_eq=mass[None].numpy(),
        b_eq=[1.0],
    )
    if found.status == 2:
        assert client.relaxed == 1
        return
    assert client.relaxed == 0
    assert float(gain @ client.a) == pytest.approx(-found.fun, abs=1e-7)
    theta = k @ client.a
    assert float(theta.mean()) == pytest.approx(1)
    assert float((among @ client.a).max()) <= bound + 1e-9
    assert abs(float(lean @ client.a)) <= tau + 1e-9
    assert float((theta * losses).mean()) >= float(losses.mean()) * 0.5


def test_the_next_round_trains_on_the_reweighed_loss():
    clients = [people(60, 3), people(90, 4)]
    rule = FA(BASES, sigma=1.0, tau=1.0, penalty=2.0)
    extras = committed(rule, clients)
    a_coefficients = rule.client_rule().a
    module, (term,), _ = run(rule, clients[0])
    x, y, a = clients[0]
    z, theta = module.net(x).squeeze(1), kernels(x) @ a_coefficients
    share = float(extras["group_counts"][:, 1].sum() / 150)
    covariance = (theta * (a - share) * z).mean()
    losses = binary_cross_entropy_with_logits(z, y.double(), reduction="none")
    torch.testing.assert_close(term, (theta * losses).mean() + 2 * (covariance.abs() - 1.0).clamp_min(0))


def test_bases_without_samples_get_nothing_and_impossible_bounds_are_counted():
    far = torch.cat([BASES, torch.tensor([[1e3, 0.0]])])
    rule = FA(far, sigma=1.0)
    committed(rule, [people(30, 5)])
    assert rule.client_rule().a[3] == 0
    # theta would have to be 1 everywhere on average, yet at most 1 at the bases
    tight = FA(BASES, sigma=1.0, bound=1.0)
    x, y, a = people(30, 6)
    with pytest.warns(UserWarning, match="FA found no weights in round 0"):
        committed(tight, [(x * 0.01 + 5.0, y, a)])
    assert tight.client_rule().relaxed == 1
    assert len(tight.client_rule().a) == 0
    rule_state.reset(tight.client_rule())
    assert tight.client_rule().relaxed == 0


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"inputs of FA must have shape \[B, 3\] as its bases do, found \[5, 2\]"):
        run(FA(torch.ones(1, 3)), people(5, 1))
    with pytest.raises(ValueError, match=r"extras must hold 'group_counts' \[m, 2\] for FA, found"):
        FA(BASES, sigma=1.0).client_rule().commit(make_cohort(random_rows(2, 1), extras={}))
    client = FA(BASES, sigma=1.0).client_rule()
    rule_state.load_state_dict(client, {"relaxed": 0, "a": torch.ones(5), "share": 0.5})
    with pytest.raises(ValueError, match="bases of FA must be the 5 of the checkpoint, found 3"):
        client.begin_fit(fl.algorithms.Federation(1, ParamLayout.from_sizes([2]), torch.device("cpu"), torch.float32))


@pytest.mark.parametrize("dimensions", [2, 14, 30])
def test_the_default_width_follows_the_bases(dimensions):
    """Standard-normal inputs, some of which are the bases: weights are found in every number of dimensions."""
    draw = torch.Generator().manual_seed(dimensions)
    x = torch.randn(300, dimensions, generator=draw, dtype=torch.float64)
    rule = FA(x[:20])
    client = rule.client_rule()
    client.commit(_reported(client, x, draw))
    assert len(client.a) == 20
    assert not client.stuck
    assert float((client._kernels(x) @ client.a).mean()) == pytest.approx(1.0)


def _reported(client, x, draw, when=0):
    losses, scores, member = (torch.rand(len(x), generator=draw, dtype=torch.float64) for _ in range(3))
    rows = torch.stack([torch.ones_like(losses), losses, scores, member.round() * scores])
    extras = {"kernel_sums": (rows @ client._kernels(x))[None], "group_counts": torch.tensor([[len(x), len(x) / 2]])}
    return make_cohort(random_rows(1, 0), when=when, extras=extras)


def test_kernels_too_narrow_for_the_data_are_warned_of_once_and_flagged():
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(300, 14, generator=draw, dtype=torch.float64)
    rule = FA(x[:20], sigma=1.0)
    client, cohort = rule.client_rule(), make_cohort(random_rows(1, 0))
    rule.aggregate(cohort)
    assert not rule.report.flagged
    with pytest.warns(UserWarning, match=r"no weights in round 4: .* sigma=1 .* raise sigma or bound"):
        client.commit(_reported(client, x, draw, 4))
    client.commit(_reported(client, x, draw, 5))  # without a second warning, which would be an error
    assert client.relaxed == 2
    assert len(client.a) == 0
    rule.aggregate(cohort)
    assert rule.report.flagged
    again = FA(x[:20], sigma=1.0)
    rule_state.load_state_dict(again.client_rule(), rule_state.state_dict(client))
    assert again.client_rule().stuck
    rule_state.reset(again.client_rule())
    assert not again.client_rule().stuck
