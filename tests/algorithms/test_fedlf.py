# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
import torch
import vector_forms
from algorithm_cohorts import SIZES, make_cohort, random_rows, sampled_rounds, switched

from fl_lightning.algorithms import FedLF
from fl_lightning.core.layout import ParamLayout


def blocks_of(rule, layout):
    blocks = rule.blocks or tuple((layer,) for layer in range(layout.num_layers))
    return [slice(layout.layer_starts[block[0]], layout.layer_starts[block[-1] + 1]) for block in blocks]


def conflicts(rule, cohort, step):
    """Online clients that conflict with the step, in the model and in every block, from vectors in float64."""
    rows, d = cohort.updates.rows.double(), step.double()
    parts = [slice(None), *blocks_of(rule, cohort.updates.layout)]
    return sum(int((rows[:, part] @ d[part] < 0).sum()) for part in parts)


@pytest.mark.parametrize("fair_row", ["always", "needed"])
@pytest.mark.parametrize("sizes", [SIZES, (2, 1, 12, 1, 3)], ids=str)
def test_equals_its_vector_form(sizes, fair_row):
    """Rounds with equal losses, with unequal ones, and with rows that are alike, of which the fair row is noise.

    Layers of 1 to 3 columns have no common direction in most rounds, and merge.
    """
    layout, shares, merged = ParamLayout.from_sizes(sizes), set(), 0
    for seed in range(6):
        rule, memory = FedLF(fair_row=fair_row), vector_forms.Remembered("ratio")
        for cohort in sampled_rounds(9, 7, 3 + seed % 2, seed, n=sum(sizes), layout=layout):
            rows, losses = cohort.updates.rows, cohort.losses
            if cohort.round % 3 == 1:
                losses = 1 + 0.1 * losses
            if cohort.round % 3 == 2:
                rows = rows.mean(0) + 0.1 * rows
            cohort = make_cohort(rows, losses, cohort.client_ids, cohort.round, layout)
            expected, blocks, _ = vector_forms.fedlf(
                rows.numpy(), losses.numpy(), memory.absent(cohort.client_ids, cohort.round), layout.layer_starts,
                needed=fair_row == "needed",
            )  # fmt: skip
            step = rule.aggregate(cohort)
            np.testing.assert_allclose(step.numpy(), expected, rtol=0, atol=1e-9 * np.linalg.norm(expected))
            assert [(part.start, part.stop) for part in blocks_of(rule, layout)] == blocks
            assert rule.report.scalars["blocks"] == len(blocks)
            assert conflicts(rule, cohort, step) == 0
            share = rule.report.scalars.get("fair_layers", 1)
            assert share == 0 or fair_row == "always" or cohort.round % 3 != 1
            shares.add(share)
            merged += len(blocks) < layout.num_layers
            memory.store(cohort)
    assert (merged > 0) == (sizes != SIZES)
    assert fair_row == "always" or (0 in shares and any(0 < share < 1 for share in shares))


@pytest.mark.parametrize(("angle", "takes_part"), [(0.99, False), (1.01, True)])
@pytest.mark.parametrize("m", [2, 6])
def test_losses_within_a_sixteenth_of_pi_need_no_fair_row(angle, takes_part, m):
    away = torch.zeros(m, dtype=torch.float64)
    away[0], away[1] = 1, -1
    losses = 1 + away / away.norm() * math.tan(angle * math.pi / 16) * math.sqrt(m)
    assert (FedLF(fair_row="needed")._fair_weights(losses) is not None) == takes_part


def test_a_fair_row_that_would_stall_is_left_out_without_a_flag():
    row = random_rows(1, 23)
    rule = FedLF(fair_row="needed")
    step = rule.aggregate(make_cohort(row.expand(3, -1).clone(), [1.0, 1.0, 5.0]))
    torch.testing.assert_close(step, row[0])
    assert not rule.report.flagged
    assert rule.report.scalars["fair_layers"] == 0


@pytest.mark.parametrize("opposition", [1e-1, 1e-2, 1e-3, 3e-4, 1e-4, 1e-5, 0.0])
def test_no_online_client_conflicts_however_opposed_they_are(opposition):
    """Nearly opposite float32 rows leave a tiny direction, which rounding must not turn around."""
    flagged = 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(6, 60, generator=generator)
        rows[3:] = -rows[:3] + opposition * torch.randn(3, 60, generator=generator)
        rule = FedLF(layers="model")
        cohort = make_cohort(rows, torch.rand(6, generator=generator) + 0.1, layout=ParamLayout.from_sizes([60]))
        step = rule.aggregate(cohort)
        assert conflicts(rule, cohort, step) == 0
        assert step.norm() <= rows.mean(0).norm() * 1.0001
        flagged += rule.report.flagged
    assert flagged == (0 if opposition > 1e-2 else 20 if opposition < 1e-4 else flagged)


def test_merging_everything_equals_one_block():
    """Every layer holds a client and its opposite, but not the model."""
    layout = ParamLayout.from_sizes([1, 1, 1])
    rows = torch.tensor([[1.0, -1, 1], [-1, 1, 1], [1, 1, -1]], dtype=torch.float64)
    rule, whole = switched(FedLF(), fair_kind="none"), switched(FedLF("model"), fair_kind="none")
    step = rule.aggregate(make_cohort(rows, layout=layout))
    assert rule.blocks == ((0, 1, 2),)
    torch.testing.assert_close(step, whole.aggregate(make_cohort(rows, layout=layout.merged())))
    assert (rows @ step > 0).all()
    plain = switched(FedLF(reading="code"), fair_kind="none")
    assert not plain.aggregate(make_cohort(rows, layout=layout)).any()
    assert plain.blocks is None


def test_conflicts_are_counted_in_the_blocks_that_were_solved():
    """Of the first client, whose row is too short to count; in the first case every layer stands alone."""
    wide, narrow = ParamLayout.from_sizes(SIZES), ParamLayout.from_sizes([1, 1, 1])
    cyclic = torch.tensor([[1.0, -1, 1], [-1, 1, 1], [1, 1, -1]], dtype=torch.float64)
    for rows, layout, merged in ((random_rows(3, 39), wide, 0), (cyclic, narrow, 3)):
        rows = torch.cat([-1e-9 * rows.sum(0, keepdim=True), rows])
        rule = FedLF()
        step = rule.aggregate(make_cohort(rows, [1.0, 1.0, 1.0, 1.0], layout=layout))
        counts = [int((rows[:, part] @ step[part] < 0).sum()) for part in blocks_of(rule, layout)]
        assert rule.report.scalars["block_conflicts"] == sum(counts) == len(counts)
        assert rule.report.scalars["merged_layers"] == merged


def test_layer_without_rows_stays_and_does_not_merge():
    rows = random_rows(4, 27)
    rows[:, 30:42] = 0
    rule = FedLF()
    step = rule.aggregate(make_cohort(rows))
    assert rule.blocks is None
    assert not rule.report.flagged
    assert not step[30:42].any()
    assert step[:30].any()


@pytest.mark.parametrize("equalise", [True, False])
def test_history_in_a_layer_that_nobody_online_moves_is_ignored(equalise):
    rule = FedLF(reading="library" if equalise else "paper")
    rule.aggregate(make_cohort(random_rows(3, 28), ids=[0, 1, 2]))
    rows = random_rows(3, 29)
    rows[:, :30] = 0
    step = rule.aggregate(make_cohort(rows, ids=[3, 4, 5], when=1))
    assert rule.report.scalars["history_rows"] == 3
    assert not step[:30].any()


def test_units_of_remembered_rows_follow_the_learning_rate():
    """A row is lr x gradient: with a smaller rate a remembered gradient must not weigh more than a new one."""
    old, new = random_rows(3, 33), random_rows(3, 34)
    steps = []
    for late in (1.0, 0.1):
        rule = FedLF(reading="paper")
        rule.aggregate(make_cohort(old, ids=[0, 1, 2], lr=1.0))
        steps.append(rule.aggregate(make_cohort(late * new, ids=[3, 4, 5], when=1, lr=late)) / late)
    torch.testing.assert_close(*steps)
