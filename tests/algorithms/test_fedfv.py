# SPDX-License-Identifier: Apache-2.0
from itertools import permutations

import pytest
import torch
import vector_forms
from algorithm_cohorts import SIZES, make_cohort, random_rows, sampled_rounds

from fl_lightning.algorithms import Federation, FedFV
from fl_lightning.core.layout import ParamLayout


def opposed_rows(m, seed):
    """Rows of which most pairs conflict."""
    rows = random_rows(m, seed)
    return rows - 1.2 * rows.mean(0)


def opposed_rounds(rounds, clients, m, seed):
    for cohort in sampled_rounds(rounds, clients, m, seed):
        yield make_cohort(opposed_rows(m, 100 * seed + cohort.round), cohort.losses, cohort.client_ids, cohort.round)


def steps_in_order(rounds, **arguments):
    rule = FedFV(0.2, 0, **arguments)
    return [rule.aggregate(cohort) for cohort in rounds]


def test_other_projecting_orders_are_those_of_table_4():
    rounds = list(opposed_rounds(6, 12, 4, seed=72))

    def written(cohort, reordered):
        other = vector_forms.FedFV(0.2, 0, reordered=reordered)
        return torch.from_numpy(other.step(cohort.updates.rows.numpy(), cohort.losses.numpy(), range(4), 0))

    for cohort, step in zip(rounds, steps_in_order(rounds, order="reversed"), strict=True):
        torch.testing.assert_close(step, written(cohort, lambda order: order[::-1]))
    drawn, again, others = (steps_in_order(rounds, order="random", seed=seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, drawn, again))
    assert not all(map(torch.equal, drawn, others))
    chosen = []
    for cohort, step in zip(rounds, drawn, strict=True):
        forms = [written(cohort, lambda order, p=p: [order[k] for k in p]) for p in permutations(range(4))]
        chosen.append(min(range(24), key=lambda k: (forms[k] - step).norm()))
        torch.testing.assert_close(step, forms[chosen[-1]])
    assert len(set(chosen)) > 1  # drawn anew in every round
    with pytest.raises(ValueError, match="seed of FedFV must be left out where order='loss'"):
        FedFV(seed=1)


@pytest.mark.parametrize(
    ("m", "alpha", "kept"),
    [
        (10, 0.0, 0), (10, 0.1, 1), (10, 0.2, 2), (10, 1 / 3, 3), (10, 0.5, 5), (10, 1.0, 10),
        (3, 1 / 3, 1), (10, 0.01, 1), (1, 0.1, 1), (11, 0.7, 7), (2, 0.5, 1),
    ],
)  # fmt: skip
def test_number_of_clients_that_keep_their_updates(m, alpha, kept):
    """The published numbers; in exact arithmetic it would be 4 for a third of 10 and 8 for 0.7 of 11."""
    assert FedFV(alpha)._kept(m) == kept


@pytest.mark.parametrize(("m", "alpha", "kept"), [(10, 0.1, 1), (10, 0.01, 0), (3, 1 / 3, 1), (5, 0.5, 3), (4, 1.0, 4)])
def test_number_that_keep_theirs_by_the_paper(m, alpha, kept):
    assert FedFV(alpha, reading="paper")._kept(m) == kept


@pytest.mark.parametrize("scale", [1.0, 1e40])
@pytest.mark.parametrize(("absent", "conflicts"), [([0.0, 1.0], 0), ([-1.0, 1.0], 1)])
def test_an_absent_row_at_a_right_angle_is_no_conflict_however_long_rows_are(scale, absent, conflicts):
    rule, layout = FedFV(), ParamLayout.from_sizes([2])
    for when, row in enumerate((absent, [1.0, 0.0])):
        rows = scale * torch.tensor([row], dtype=torch.float64)
        rule.aggregate(make_cohort(rows, [1.0], [when], when, layout=layout))
    assert rule.report.scalars["external_conflicts"] == conflicts


def test_opposite_updates_give_no_step_but_are_remembered():
    row = random_rows(1, 81)
    rule = FedFV(alpha=0.0)
    assert not rule.aggregate(make_cohort(torch.cat([row, -row]), [1.0, 2.0])).any()
    assert rule.report.flagged
    assert len(rule.history) == 2


def test_a_row_that_is_almost_zero_decides_nothing():
    rows = opposed_rows(4, 82)
    rows[1] = -1e-9 * rows[0]
    silent = rows.clone()
    silent[1] = 0
    for alpha in (0.0, 0.3):
        one, two = (FedFV(alpha, 0).aggregate(make_cohort(r)) for r in (rows, silent))
        torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-8)


def test_memory_plan_is_bounded_by_the_window():
    federation = Federation(100, ParamLayout.from_sizes(SIZES), torch.device("cpu"), torch.float32, 10)
    rules = [FedFV(tau=tau, max_history=cap) for tau, cap in ((0, None), (2, None), (50, 30))]
    for rule in rules:
        rule.begin_fit(federation)
    plans = [rule.memory(federation, 10) for rule in rules]
    assert plans[0] == {}
    rows = [20, 30]
    assert [plan["FedFV.history"] for plan in plans[1:]] == [k * 92 * 4 + 3 * k * k * 8 for k in rows]
