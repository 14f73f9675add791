# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows

from fl_lightning.algorithms import AdaFed


def published(rows, losses, gamma):
    """The paper's steps on vectors: equations 5 and 6, then 12 to 14."""
    orthogonal = []
    for row, loss in zip(rows, losses, strict=True):
        shares = [row @ v / (v @ v) for v in orthogonal]
        rest = row - sum((share * v for share, v in zip(shares, orthogonal, strict=True)), np.zeros_like(row))
        orthogonal.append(rest / (abs(loss) ** gamma - sum(shares)))
    squares = np.array([v @ v for v in orthogonal])
    return (1 / squares / (1 / squares).sum()) @ np.stack(orthogonal)


def promised(rows, phi):
    """The shortest vector with ``rows @ d`` in proportion to ``phi`` and ``rows @ d = phi ||d||^2``."""
    d = np.linalg.lstsq(rows, phi, rcond=None)[0]
    return d / (d @ d)


def drawn(seed, m=5):
    rows = random_rows(m, seed) + 0.7 * random_rows(1, 100 + seed)
    return rows, torch.rand(m, generator=torch.Generator().manual_seed(seed)).double() + 0.1


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("unit", ["one", "largest"])
def test_equals_the_papers_steps_on_vectors(gamma, unit):
    for seed in range(20):
        rows, losses = drawn(seed)
        step = AdaFed(gamma, unit).aggregate(make_cohort(rows, losses)).numpy()
        losses = losses.numpy() / (1 if unit == "one" else losses.max().item())
        np.testing.assert_allclose(step, published(rows.numpy(), losses, gamma), rtol=0, atol=1e-9)
        np.testing.assert_allclose(step, promised(rows.numpy(), losses**gamma), rtol=0, atol=1e-9)


def test_no_step_is_longer_than_the_update_of_the_largest_loss():
    for seed in range(20):
        rows, losses = drawn(seed)
        rows = rows * torch.logspace(-2, 2, 5, dtype=torch.float64)[:, None]
        for scale in (1e-12, 1.0, 1e12):
            step = AdaFed(2.0).aggregate(make_cohort(rows, scale * losses))
            assert step.norm() <= rows[losses.argmax()].norm() * (1 + 1e-9)
            torch.testing.assert_close(step, AdaFed(2.0).aggregate(make_cohort(rows, losses)))


def test_clients_whose_update_others_have_together_have_no_say():
    rows, losses = drawn(3, 4)
    copies = torch.cat([rows, rows[:1] + rows[1:2], torch.zeros_like(rows[:1])])
    more = torch.cat([losses, losses.min() * torch.tensor([0.5, 0.1])])
    rule = AdaFed()
    step = rule.aggregate(make_cohort(copies, more))
    torch.testing.assert_close(step, AdaFed().aggregate(make_cohort(rows, losses)))
    assert rule.report.scalars == {"dependent": 2.0}
    assert rule.report.weights[4:].tolist() == [0, 0]


def test_of_equal_updates_that_of_the_largest_loss_counts():
    rows, losses = drawn(4, 3)
    for order in ([0, 1, 2, 3], [3, 1, 2, 0]):
        four, more = torch.cat([rows, rows[:1]])[order], torch.cat([losses, losses[:1] + 1])[order]
        step = AdaFed().aggregate(make_cohort(four, more))
        kept = torch.stack([rows[0], rows[1], rows[2]])
        expected = AdaFed().aggregate(make_cohort(kept, torch.cat([losses[:1] + 1, losses[1:]])))
        torch.testing.assert_close(step, expected)


@pytest.mark.parametrize(("apart", "shorter", "dependent"), [(1e-3, 1e-2, 0), (3e-5, 0, 0), (1e-6, None, 1)])
def test_nearly_equal_updates_with_different_losses_stall(apart, shorter, dependent):
    rows = random_rows(1, 5).expand(2, -1) + apart * random_rows(2, 6)
    rule = AdaFed()
    step = rule.aggregate(make_cohort(rows, [1.0, 0.1]))
    assert rule.report.scalars == {"dependent": dependent}
    assert rule.report.flagged == (shorter == 0)
    if shorter is None:  # they are one update, and the larger loss counts
        torch.testing.assert_close(step, rows[0])
    else:
        assert step.norm() <= shorter * rows[0].norm()


@pytest.mark.parametrize("losses", [[0.0] * 4, [-1.0] * 4, [1.0] * 4])
def test_equal_losses_count_alike_whatever_they_are(losses):
    rows = random_rows(4, 7)
    step = AdaFed().aggregate(make_cohort(rows, losses))
    torch.testing.assert_close(step, AdaFed(0.0).aggregate(make_cohort(rows)))


def test_who_sends_nothing_does_not_say_what_losses_are_measured_in():
    rows, losses = drawn(5, 3)
    more = torch.cat([rows, torch.zeros_like(rows[:1])])
    step = AdaFed().aggregate(make_cohort(more, torch.cat([losses, torch.tensor([1e9]).double()])))
    torch.testing.assert_close(step, AdaFed().aggregate(make_cohort(rows, losses)))
