# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows
from client_rounds import INPUTS, Net, Rounds, flat
from torch.nn.functional import binary_cross_entropy_with_logits

from fl_lightning.algorithms import ClientRule, FedAvg, FedFB

ALPHA, LR, A = 0.8, 0.5, 3


class ThreeGroups(Net):
    """Labels and groups come with the batch; ``loss`` must not matter."""

    def __init__(self):
        super().__init__(norm=False)

    def federated_groups(self, batch):
        x, y = batch
        logits = self.head(self.encoder(x))
        return logits[:, 0] - logits[:, 1], y % 2, y // 2

    def loss(self, batch):
        return self.encoder(batch[0]).square().mean()


def people(sizes=(40, 25, 60), seed=3):
    """``{client: [(x, y)]}`` with ``y = 2 a + label``; groups differ in size, and in how often their label is 1."""
    draw = torch.Generator().manual_seed(seed)
    data = {}
    for client, size in enumerate(sizes):
        a = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), size, replacement=True, generator=draw)
        y = (torch.rand(size, generator=draw) < torch.tensor([0.3, 0.5, 0.8])[a]).long()
        x = torch.randn(size, INPUTS, generator=draw, dtype=torch.float64)
        x[:, 0] += 2 * y
        x[:, 1] += a
        data[client] = [(x, 2 * a + y)]
    return data


class FairBatch:
    """The authors' update on pooled data, with dicts and ``lambda`` as it is; it follows a round later."""

    def __init__(self, everybody):
        x, self.code = everybody
        self.net, self.x = ThreeGroups(), x
        self.y, self.a = self.code % 2, self.code // 2
        self.m = [int((self.a == a).sum()) for a in range(A)]
        self.whole = [2 * m / len(x) for m in self.m]
        self.lam = {(y, a): self.m[a] / len(x) for y in (0, 1) for a in range(A)}

    def step(self, t):
        z, _, _ = self.net.federated_groups((self.x, self.code))
        losses = binary_cross_entropy_with_logits(z, self.y.double(), reduction="none")
        pairs = list(zip(self.y.tolist(), self.a.tolist(), strict=True))
        v = torch.tensor([self.lam[pair] / self.m[pair[1]] for pair in pairs]).double()
        gradients = torch.autograd.grad((v * losses).sum() / v.sum(), list(self.net.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(self.net.parameters(), gradients, strict=True):
                parameter -= LR * gradient
        rate = []
        for a in range(A):
            of = {y: losses[(self.y == y) & (self.a == a)].detach() for y in (0, 1)}
            rate.append((len(of[1]) - float(of[1].sum()) + float(of[0].sum())) / self.m[a])
        pace, above = ALPHA / (t + 1) ** 0.5, [rate[a] - rate[0] for a in range(1, A)]
        for a in range(A):
            moved = self.lam[0, a] + (pace * above[a - 1] if a else -pace * sum(above))
            self.lam[0, a] = min(max(moved, 0.0), self.whole[a])
            self.lam[1, a] = self.whole[a] - self.lam[0, a]


def test_full_batches_are_pooled_fairbatch_on_three_groups():
    data, rule = people(), FedFB(ALPHA, A)
    run = Rounds(rule, rule.client_rule(), data, ThreeGroups(), lr=LR)
    pooled = FairBatch([torch.cat(column) for column in zip(*(own[0] for own in data.values()), strict=True)])
    lams = []
    for t in range(12):
        run.round([0, 1, 2])
        pooled.step(t)
        torch.testing.assert_close(run.params, flat(pooled.net))
        found = rule.client_rule().zero_share * torch.tensor(pooled.whole)
        lams.append([pooled.lam[0, a] for a in range(A)])
        torch.testing.assert_close(found, torch.tensor(lams[-1]).double())
    assert rule.report.scalars["surrogate_gap"] > 0
    assert {0.0, *pooled.whole} & {value for lam in lams for value in lam}  # the bounds were met


def test_alpha_0_is_fedavg_on_the_cross_entropy_of_the_scores():
    class Plain(ThreeGroups):
        def loss(self, batch):
            z, y, _ = self.federated_groups(batch)
            return binary_cross_entropy_with_logits(z, y.double())

    data, found = people(), []
    for rule, client, module in ((FedFB(0.0, A), None, ThreeGroups()), (FedAvg(), ClientRule(), Plain())):
        run = Rounds(rule, client or rule.client_rule(), data, module)
        for ids in ((0, 1), (2, 0)):
            run.round(ids)
        found.append(run.params)
    torch.testing.assert_close(*found)


def told(counts, losses):
    return {"label_counts": torch.tensor(counts).double(), "label_losses": torch.tensor(losses).double()}


def test_all_clients_seen_count_for_the_size_of_a_group_and_absent_groups_stay():
    rule = FedFB(1.0, A)
    client = rule.client_rule()
    first = told([[[2, 1, 0], [2, 1, 0]]], [[[1, 1, 0], [0, 0, 0]]])
    client.commit(make_cohort(random_rows(1, 1), ids=[4], sizes=[6.0], extras=first))
    # rates 3/4 and 1 of groups with 4 and 2 of 6 samples: 1/4 over 2 * 4/6, and over 2 * 2/6
    expected = torch.tensor([0.5 - 0.25 * 6 / 8, 0.5 + 0.25 * 6 / 4, 0.5]).double()
    torch.testing.assert_close(client.zero_share, expected)
    second = told([[[2, 1, 0], [2, 1, 0]], [[0, 0, 3], [0, 0, 3]]], [[[0, 0, 0], [0, 0, 0]], [[0, 0, 3], [0, 0, 0]]])
    client.commit(make_cohort(random_rows(2, 1), ids=[4, 1], sizes=[6.0, 6.0], when=3, extras=second))
    assert client.counts.sum(0).tolist() == [4, 2, 6]
    # rates 1/2, 1/2 and 1; the pace is 1/2
    expected += 0.5 * torch.tensor([-0.5 * 12 / 8, 0.0, 0.5]).double()
    torch.testing.assert_close(client.zero_share, expected.clamp(0, 1))
    before = client.zero_share
    lacking = told([[[0, 1, 0], [0, 1, 0]]], [[[0, 1, 0], [0, 0, 0]]])
    client.commit(make_cohort(random_rows(1, 1), ids=[2], sizes=[6.0], extras=lacking))  # nobody of group 0
    torch.testing.assert_close(client.zero_share, before)


def test_what_weighs_nothing_moves_nobody():
    rule = FedFB(num_groups=A)
    client = rule.client_rule()
    client.zero_share = torch.tensor([0.0, 0.5, 0.5]).double()
    batch = torch.randn(4, INPUTS, dtype=torch.float64), torch.zeros(4, dtype=torch.long)  # label 0 of group 0
    run = Rounds(rule, client, {0: [batch]}, ThreeGroups())
    run.round([0])
    torch.testing.assert_close(run.params, flat(ThreeGroups()))
    assert rule.report.flagged


@pytest.mark.parametrize(
    ("counts", "losses", "words"),
    [
        ([[5, 0], [0, 2]], [[0, 0], [0, 0]], r"extras\['label_counts'\] must lie between 0 and 6"),
        ([[1, 0], [0, -1]], [[0, 0], [0, 0]], r"extras\['label_counts'\] must lie between 0 and"),
        ([[1, 0], [0, 1]], [[-1, 0], [0, 0]], r"extras\['label_losses'\] must lie between 0 and"),
    ],
)
def test_what_no_client_can_have_counted_is_refused(counts, losses, words):
    with pytest.raises(ValueError, match=words):
        FedFB().aggregate(make_cohort(random_rows(1, 1), sizes=[6.0], extras=told([counts], [losses])))


def test_groups_are_those_that_the_method_has():
    data, rule = people(), FedFB(num_groups=2)
    with pytest.raises(
        ValueError, match=r"groups of ThreeGroups.federated_groups must be 0 or 1, found \[0, .*FedFB take more"
    ):
        Rounds(rule, rule.client_rule(), data, ThreeGroups()).train(0)
    rule.client_rule().zero_share = torch.full((3,), 0.5)
    with pytest.raises(ValueError, match="num_groups of FedFB must be the checkpoint's 3, found 2"):
        rule.client_rule().begin_fit(SimpleNamespace())
