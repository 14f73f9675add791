# SPDX-License-Identifier: Apache-2.0
"""FedHEAL against a loop with integer thresholds, coordinate by coordinate."""

from fractions import Fraction
from functools import partial
from math import ceil, floor

import pytest
import torch
from algorithm_cohorts import make_cohort, switched
from cases import pairwise
from implementations import every

import fl_lightning as fl
from fl_lightning import ops
from fl_lightning.algorithms.fedheal import FedHEAL
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import rule_state

LAYOUT = ParamLayout.from_sizes([5, 1, 40, 3])
N = LAYOUT.numel


def cohort(ids, rows, index):
    return make_cohort(rows, False, ids, index, LAYOUT, sizes=torch.tensor([10 + i for i in ids]), num_clients=8)


def drifting(ids, index, seed=0):
    """Updates whose signs mostly persist per client, with exact zeros among them."""
    rows = []
    for client in ids:
        base = torch.randn(N, generator=torch.Generator().manual_seed(seed + client))
        noise = torch.randn(N, generator=torch.Generator().manual_seed(10_000 + seed + 97 * index + client))
        row = base + 1.5 * noise
        row[client % N] = 0.0
        rows.append(row)
    return torch.stack(rows)


class Loop:
    """The method as one would write it with Python integers."""

    def __init__(self, tau, beta=0.4, order="code", weight_norm="cumulative"):
        self.tau, self.beta, self.order, self.weight_norm = Fraction(str(tau)), beta, order, weight_norm
        self.counts, self.rounds, self.p, self.gain = {}, {}, {}, {}

    def keep(self, client, row):
        t, c = self.rounds.get(client, 0), self.counts.get(client, [0] * N)
        s = [int(value <= 0) for value in row.tolist()]  # the parameter moves by -row
        agree = [ci if si else t - ci for ci, si in zip(c, s, strict=True)]
        if self.order == "code":
            threshold = 0 if t == 0 else floor(self.tau * t) + 1
        else:
            threshold = max(0, ceil(self.tau * (t + 1)) - 1)
        self.counts[client] = [ci + si for ci, si in zip(c, s, strict=True)]
        self.rounds[client] = t + 1
        return torch.tensor([a >= threshold for a in agree])

    def step(self, ids, rows):
        masks = [self.keep(client, row) for client, row in zip(ids, rows, strict=True)]
        masked = [(row * mask).double() for row, mask in zip(rows, masks, strict=True)]
        d = [sum(float(part.norm()) for part in row.split([5, 1, 40, 3])) for row in masked]
        start = sum(self.p.values()) / len(self.p) if self.p else 1 / len(ids)
        for client in ids:
            if client not in self.p:
                self.p[client], self.gain[client] = start, 0.0
        for client, value in zip(ids, d, strict=True):
            self.gain[client] = (1 - self.beta) * self.gain[client] + self.beta * value / sum(d)
            self.p[client] += self.gain[client]
        if self.weight_norm == "renormalised":
            total = sum(self.p.values())
            self.p = {client: value / total for client, value in self.p.items()}
        p = torch.tensor([self.p[client] for client in ids], dtype=torch.float64)
        p /= p.sum()
        numerator = sum(w * row for w, row in zip(p, masked, strict=True))
        denominator = sum(w * mask.double() for w, mask in zip(p, masks, strict=True))
        step = torch.where(denominator > 0, numerator / denominator.clamp_min(1e-300), 0.0)
        return step, p, torch.stack(masks)


@every
@pytest.mark.parametrize(
    ("tau", "order", "weight_norm"), pairwise([0.3, 0.7], ["code", "paper"], ["cumulative", "renormalised"])
)
def test_sixty_rounds_equal_the_loop(call, tau, order, weight_norm, monkeypatch):
    for op in ("puc_track", "puc_combine"):
        monkeypatch.setattr(ops, op, partial(call, op))
    rule = switched(FedHEAL(tau), counts_round_in=order == "paper", renormalises=weight_norm == "renormalised")
    loop = Loop(tau, order=order, weight_norm=weight_norm)
    empty = 0
    for index in range(60):
        # Client 5 joins late, others come and go.
        ids = tuple(c for c in range(6) if (c != 5 or index >= 20) and (c + index) % 7 != 3)
        rows = drifting(ids, index)
        step = rule.aggregate(cohort(ids, rows, index))
        expected, p, masks = loop.step(ids, rows)
        assert torch.allclose(step.double(), expected, atol=1e-6)
        assert torch.allclose(rule.report.weights, p, atol=1e-6)
        assert rule.report.scalars["kept_share"] == pytest.approx(masks.double().mean().item(), abs=1e-12)
        empty += int((~masks.any(0)).sum())
    for client, counts in rule_state.state_dict(rule)["counts"].items():
        assert counts.dtype == torch.uint8
        assert counts.tolist() == loop.counts[client]
    assert tau < 0.5 or empty > 0, "the case of a coordinate that nobody keeps must occur"


def test_parts_can_be_switched_off():
    ids, rows = (0, 1, 2), drifting((0, 1, 2), 0)
    neither = switched(FedHEAL(filter_updates=False, adapt_weights=False), weighs_by_samples=True)
    assert torch.allclose(
        neither.aggregate(cohort(ids, rows, 0)), fl.algorithms.FedAvg().aggregate(cohort(ids, rows, 0)), atol=1e-6
    )
    weights_only = FedHEAL(filter_updates=False)
    weights_only.aggregate(cohort(ids, rows, 0))
    assert weights_only.report.scalars["kept_share"] == 1
    assert weights_only.report.weights.std() > 0
    frozen = FedHEAL(beta=0.0)
    frozen.aggregate(cohort(ids, rows, 0))
    assert torch.allclose(frozen.report.weights, torch.full((3,), 1 / 3, dtype=torch.float64))


def test_counts_widen_before_they_overflow():
    rule = FedHEAL()
    for index in range(300):
        rule.aggregate(cohort((4,), -torch.ones(1, N), index))
    (counts,) = rule_state.state_dict(rule)["counts"].values()
    assert counts.dtype == torch.int16
    assert set(counts.tolist()) == {300}


def test_consistency_is_how_often_the_more_frequent_sign_came():
    rule, rows = FedHEAL(), [drifting((4,), index) for index in range(6)]
    for index, row in enumerate(rows):
        rule.aggregate(cohort((4,), row, index))
    falls = torch.stack([row[0] <= 0 for row in rows]).float().mean(0)
    torch.testing.assert_close(rule.sign_consistency(4), torch.maximum(falls, 1 - falls))
    with pytest.raises(KeyError):
        rule.sign_consistency(5)
