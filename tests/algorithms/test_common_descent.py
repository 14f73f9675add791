# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
import torch
from algorithm_cohorts import SIZES, make_cohort, random_rows
from cases import in_turn
from cohort_families import FAMILIES, rounds_of
from qp_cases import shortest_point

from fl_lightning.algorithms import FedLF, FedMDFG, FedMGDAPlus
from fl_lightning.algorithms._shared.rows import fair_weights, loss_angle, rounding_error
from fl_lightning.core.layout import ParamLayout
from fl_lightning.ops.rows import row_norms


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_loss_angle_is_the_angle_to_equal_losses():
    for losses in (vector(1, 2, 3), vector(0, 0, 5), vector(4, 4, 4.5)):
        cosine = losses.sum() / losses.norm() / math.sqrt(3)
        assert loss_angle(losses) == pytest.approx(math.acos(cosine))
    assert loss_angle(vector(2, 2)) == 0
    assert loss_angle(vector(0, 0)) == 0
    assert loss_angle(vector(1, 1 + 1e-12)) == pytest.approx(5e-13, rel=1e-3)  # arccos would give 0 or 1e-8


def test_fair_weights_are_the_gradient_of_minus_the_cosine():
    losses = vector(0.3, 2.0, 1.0, 0.9).requires_grad_()
    cosine = losses.sum() / losses.norm() / 2
    (gradient,) = torch.autograd.grad(-cosine, losses)
    losses = losses.detach()
    weights = fair_weights(losses)
    torch.testing.assert_close(weights, gradient / gradient.norm())
    torch.testing.assert_close(fair_weights(losses, cosine=True), gradient)  # equation 5 of FedLF
    assert weights @ losses == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(
    "losses",
    [
        (3.0,),
        (-3.0,),
        (1.0, 1.0),
        (-1.0, -1.0 - 1e-7),
        (0.0, 0.0, 0.0),
        (1.0, 1.0 + 1e-7),
        (1e-200, 1e-200),
        (0.1 + 0.2, 0.3),
    ],
)
def test_fair_weights_are_undefined_for_equal_losses(losses):
    assert fair_weights(vector(*losses)) is fair_weights(vector(*losses), cosine=True) is None


def test_rounding_error_of_half_precision_is_that_of_float32():
    errors = [rounding_error(make_cohort(random_rows(2, 82, dtype))) for dtype in (torch.float64, torch.float32)]
    assert errors == [torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps]
    assert rounding_error(make_cohort(random_rows(2, 82, torch.bfloat16))) == errors[1]


def test_row_norms_of_rounded_grams_are_not_nan():
    assert row_norms(torch.tensor([[4.0, 0.0], [0.0, -1e-20]], dtype=torch.float64)).tolist() == [2.0, 0.0]


every_rule = pytest.mark.parametrize(
    "make", [FedLF, lambda: FedLF(reading="paper"), FedMDFG], ids=["FedLF", "FedLF-paper", "FedMDFG"]
)


@every_rule
def test_pareto_stationary_rows_give_no_step(make):
    row, rule = random_rows(1, 22), make()
    assert not rule.aggregate(make_cohort(torch.cat([row, -row, 0.5 * row]), [1.0, 2.0, 3.0])).any()
    assert rule.report.flagged
    assert len(rule.history) == (0 if isinstance(rule, FedMDFG) else 3)


@every_rule
def test_dependent_rows_with_unequal_losses_do_not_stall(make):
    """Without a guard the fair row cancels rows that depend on each other linearly."""
    one, two = random_rows(2, 23)
    for rows in (torch.stack([one, one, one]), torch.stack([one, two, (one + two) / 2])):
        rule = make()
        step = rule.aggregate(make_cohort(rows, [1.0, 1.0, 5.0]))
        assert step.norm() > 0.1 * rows.mean(0).norm()
        assert (rows @ step > 0).all()
        assert rule.report.flagged


@every_rule
def test_a_remembered_row_that_contradicts_everybody_does_not_stop_training(make):
    rows, rule = random_rows(1, 32), make()
    rule.aggregate(make_cohort(-rows, ids=[9]))
    torch.testing.assert_close(rule.aggregate(make_cohort(rows, ids=[1], when=1)), rows[0])
    assert rule.report.flagged


@pytest.mark.parametrize("rule", [FedLF, FedMDFG], ids=["FedLF", "FedMDFG"])
@pytest.mark.parametrize(("noise", "flagged"), [(1.0, False), (0.1, False), (1e-3, True)])
def test_steps_along_what_tells_like_clients_apart_are_flagged(rule, noise, flagged):
    """The direction's length beside the mean update's, on vectors: how much of what they share is left in the step."""
    rows = random_rows(1, 5) + noise * random_rows(10, 6)
    losses = torch.linspace(0.5, 1.5, 10, dtype=torch.float64)
    rule = rule()
    step = rule.aggregate(make_cohort(rows, losses, layout=ParamLayout.from_sizes([rows.shape[1]])))
    ratio = rule.report.scalars["direction_ratio"]
    unit = rows / rows.norm(dim=1, keepdim=True) * rows.norm(dim=1).mean()
    q = fair_weights(losses) @ unit
    fair = q / q.norm() * rows.norm(dim=1).mean() if isinstance(rule, FedLF) else q
    shortest = shortest_point([*unit.numpy(), fair.numpy()])
    mean = rows if isinstance(rule, FedLF) else unit
    assert ratio == pytest.approx(np.linalg.norm(shortest) / float(mean.mean(0).norm()), rel=1e-6)
    assert rule.report.flagged == flagged
    cosine = torch.nn.functional.cosine_similarity(step, rows.mean(0), 0)
    assert (abs(float(cosine)) < 0.01) == flagged


def test_a_layer_of_like_clients_is_seen_in_the_whole():
    """The ratio is that of all layers together, also where layers were solved apart."""
    rows = random_rows(4, 8)
    rule = FedLF()
    rule.aggregate(make_cohort(rows, [1.0, 2.0, 3.0, 4.0]))
    squares = 0.0
    for part in rows.split(SIZES, 1):
        lone = FedLF()
        lone.aggregate(make_cohort(part, [1.0, 2.0, 3.0, 4.0], layout=ParamLayout.from_sizes([part.shape[1]])))
        squares += (lone.report.scalars["direction_ratio"] * float(part.mean(0).norm())) ** 2
    assert rule.report.scalars["direction_ratio"] == pytest.approx(squares**0.5 / float(rows.mean(0).norm()))


DESCENTS = {
    "FedMGDAPlus": lambda: FedMGDAPlus(epsilon=1.0),
    "FedMDFG": lambda: FedMDFG(theta=0.01),
    "FedLF": FedLF,
    "FedLF-needed": lambda: FedLF(fair_row="needed"),
    "FedLF-raw": lambda: FedLF(reading="paper"),
}


@pytest.mark.parametrize(("family", "m"), in_turn(FAMILIES, (2, 3, 5)))
@pytest.mark.parametrize("name", DESCENTS)
def test_nobody_conflicts_in_the_model_or_in_a_block(name, family, m):
    """Also where rows outnumber columns, so that many depend on each other."""
    layout = ParamLayout.from_sizes((3, 1, 4))
    for cohort in rounds_of(family, m, 7, 8, m, layout=layout):
        rule = DESCENTS[name]()
        step, rows = rule.aggregate(cohort), cohort.updates.rows
        blocks = getattr(rule, "blocks", None) or (((k,) for k in range(3)) if isinstance(rule, FedLF) else ())
        for part in (slice(None), *(slice(layout.layer_starts[b[0]], layout.layer_starts[b[-1] + 1]) for b in blocks)):
            assert (rows[:, part] @ step[part] >= -1e-13 * rows.norm(dim=1) * step.norm()).all()
