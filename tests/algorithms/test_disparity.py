# SPDX-License-Identifier: Apache-2.0
"""Disparities as clients measure them, against one formula on all of a client's data."""

import math
import warnings
from itertools import permutations

import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows
from client_rounds import work_of
from cohort_families import LAYOUT
from torch import nn

from fl_lightning.algorithms import FairReg
from fl_lightning.algorithms._shared.disparity import Disparities
from fl_lightning.algorithms.groups import group_scores
from fl_lightning.core.updates import UpdateMatrix

LR, SHARPNESS = 0.3, 4.0


class Judge(nn.Module):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 3, dtype=dtype), nn.Tanh(), nn.Linear(3, 1, dtype=dtype))
        self.unused = nn.Parameter(torch.ones(2, dtype=dtype))

    def federated_groups(self, batch):
        x, y, a = batch
        return self.net(x).squeeze(1), y, a


def people(count=40, seed=0, dtype=torch.float64, num_groups=2):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=draw, dtype=torch.float64).to(dtype)
    return x, *(torch.randint(0, values, (count,), generator=draw) for values in (2, num_groups))


def measure(data, notion, batch=7, module=None, rule=None, num_groups=2):
    torch.manual_seed(0)
    module = module or Judge()

    def batches():
        yield from ((part, len(part[0])) for part in zip(*(column.split(batch) for column in data), strict=True))

    work = work_of(module, len(data[0]), LR, client_id=3, batches=batches)
    rule = rule or Disparities("FCFL", notion, SHARPNESS, num_groups)
    rule.begin_client(work)
    report = rule.end_client(work)
    return module, work.layout, report.extras["disparity"], report.companions["disparity"]


def formula(module, layout, data, notion):
    """The gap of the two groups that differ most, its gradient, and these two, the higher one first."""
    x, y, a = data
    u, m = torch.sigmoid(SHARPNESS * module.net(x).squeeze(1)), torch.ones_like(y) if notion == "dp" else y
    means = {group: u[(a == group) & (m == 1)].mean() for group in a[m == 1].unique().tolist()}
    pair = max(permutations(means, 2), key=lambda two: (means[two[0]] - means[two[1]]).item())
    gap = means[pair[0]] - means[pair[1]]
    parts = torch.autograd.grad(gap, layout.parameters(module), allow_unused=True)
    zeros = [torch.zeros(shape, dtype=u.dtype) for shape in layout.shapes]
    flat = layout.flatten([z if part is None else part for part, z in zip(parts, zeros, strict=True)])
    return gap.detach(), flat, pair


@pytest.mark.parametrize("notion", ["dp", "eo"])
@pytest.mark.parametrize(("batch", "groups"), [(1, (0, 1)), (7, (0, 1)), (40, (0, 1)), (7, (0, 1, 3))])
def test_values_and_rows_are_those_of_the_formula_however_the_data_is_batched(notion, batch, groups):
    pairs = set()
    for seed in range(8):
        x, y, a = people(seed=seed, num_groups=len(groups))
        data = x, y, torch.tensor(groups)[a]  # nobody is in group 2
        module, layout, value, row = measure(data, notion, batch, num_groups=groups[-1] + 1)
        gap, gradient, pair = formula(module, layout, data, notion)
        pairs.add(pair)
        assert value.dtype == torch.float64
        assert float(value) == pytest.approx(float(gap), abs=1e-14)
        torch.testing.assert_close(row, LR * gradient, rtol=1e-10, atol=1e-14)
        assert all(parameter.grad is None for parameter in module.parameters())
    assert len(pairs) >= len(groups), "the signs differ, and which groups differ most"


def test_notions_differ_and_half_precision_sums_in_single():
    data = people(4000, seed=1)
    assert float(measure(data, "dp")[2]) != float(measure(data, "eo")[2])
    low = Judge(torch.bfloat16)
    _, layout, value, row = measure(people(4000, 1, torch.bfloat16), "dp", 4000, low)
    exact = Judge()
    exact.load_state_dict({name: p.double() for name, p in low.state_dict().items()})
    gap, gradient, _ = formula(exact, layout, (data[0].bfloat16().double(), *data[1:]), "dp")
    assert row.dtype == torch.bfloat16
    assert float(value) == pytest.approx(float(gap), abs=2e-3)
    assert torch.nn.functional.cosine_similarity(row.double(), gradient, dim=0) > 0.98  # .9892 with torch 2.6


@pytest.mark.parametrize(
    ("notion", "words"), [("dp", r"samples of fewer .*\[40, 0\]"), ("eo", r"label 1 of .*\[0, 9\]")]
)
def test_with_one_group_alone_the_disparity_is_undefined(notion, words):
    x, y, a = people()
    data = (x, y, torch.zeros_like(a)) if notion == "dp" else (x, y * a, a)
    with pytest.warns(UserWarning, match=f"client 3 has .*{words} of each: its disparity is undefined"):
        _, layout, value, row = measure(data, notion)
    assert math.isnan(value)
    assert row.shape == (layout.numel,)
    assert not row.any()
    if notion == "eo":  # enough of both groups for the other notion
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert float(measure(data, "dp")[2]) > 0


def test_people_of_neither_group_are_left_out():
    """Also where none of a batch is left."""

    class Partly(Judge):
        def federated_groups(self, batch):
            scores, labels, groups = super().federated_groups(batch)
            known = groups != 2
            return scores[known], labels[known], groups[known]

    x, y, a = people()
    a[:7] = 2
    a[20] = 2
    module = Partly()
    found = measure((x, y, a), "dp", module=module)
    expected = measure(tuple(column[a != 2] for column in (x, y, a)), "dp", module=module)
    assert float(found[2]) == pytest.approx(float(expected[2]), abs=1e-14)


def test_predictions_are_counted_beside_the_surrogate():
    data = people(seed=2)
    rule = Disparities("FCFL", "eo", SHARPNESS)
    module = measure(data, "eo", rule=rule)[0]
    z, (_, y, a) = module.net(data[0]).squeeze(1).detach(), data
    extras = rule.end_client(None).extras
    counts = [[int((y * (a == g) * (z > 0)).sum()) for g in (0, 1)], [int((y * (a == g)).sum()) for g in (0, 1)]]
    assert extras["group_predictions"].tolist() == counts
    assert extras["score_range"].tolist() == [float(z.min()), float(z.max())]


def test_equal_treatment_has_the_sub_gradient_zero():
    x, y, a = people()
    twice = torch.cat([x, x]), torch.cat([y, y]), torch.cat([torch.ones_like(a), torch.zeros_like(a)])
    _, _, value, row = measure(twice, "dp", 80)
    assert float(value) == 0
    assert not row.any()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (None, "must return tensors scores, labels and groups, found NoneType"),
        ((torch.ones(2), torch.ones(2)), "must return tensors scores, labels and groups"),
        ((torch.ones(2), torch.ones(2), [1, 1]), r"found \['Tensor', 'Tensor', 'list'\]"),
        ((torch.ones(2, 1), torch.ones(2), torch.ones(2)), r"one shape \[B\], found \[\[2, 1\], \[2\], \[2\]\]"),
        ((torch.ones(2), torch.ones(3), torch.ones(2)), r"one shape \[B\]"),
        ((torch.ones(2).long(), torch.ones(2), torch.ones(2)), "floating-point scores, found torch.int64"),
        ((torch.ones(2), torch.tensor([0, 2]), torch.ones(2)), r"labels of .* must be 0 or 1, found \[0, 2\]"),
        (
            (torch.ones(2), torch.ones(2), torch.tensor([0.5, 1])),
            r"groups of .* must be 0 or 1, found \[0.5, 1.0\]. FCFL,",
        ),
    ],
)
def test_what_the_module_returns_is_checked(output, words):
    class Strange(nn.Module):
        def federated_groups(self, batch):
            return output

    with pytest.raises(ValueError, match=f"(?s)Strange.federated_groups.*{words}|{words}"):
        group_scores(Strange(), None)


def test_fairreg_adds_up_losses_and_disparities():
    u, v = random_rows(3, 1), random_rows(3, 2)
    v[2] = 0
    gaps = torch.tensor([0.1, 0.3, torch.nan])
    cohort = make_cohort(u, extras={"disparity": gaps}, companions={"disparity": UpdateMatrix(v, LAYOUT)})
    rule = FairReg(0.7)
    torch.testing.assert_close(rule.aggregate(cohort), u.sum(0) + 0.7 * v.sum(0))
    assert rule.report.scalars == {"without_group": 1.0, "disparity": pytest.approx(0.3)}
