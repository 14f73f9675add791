# SPDX-License-Identifier: Apache-2.0
"""Intervals and shares against numbers with known ones."""

import math
import random

import pytest

from fl_lightning.report.repetitions import Repetition, mark, paired


def drawn(dice, divisions, seeds, between, within, shift=0.0):
    """Two methods on the same divisions: what a division does to both, and what it does to their difference."""
    ours, theirs = {}, {}
    for division in range(divisions):
        common, own = dice.gauss(0, 1), dice.gauss(shift, between)
        for seed in range(seeds):
            theirs[Repetition(division, seed)] = common + dice.gauss(0, within)
            ours[Repetition(division, seed)] = common + own + dice.gauss(0, within)
    return ours, theirs


@pytest.mark.parametrize(("divisions", "seeds"), [(3, 3), (5, 1), (10, 2), (1, 5)])
@pytest.mark.parametrize(("between", "within"), [(1.0, 0.1), (0.1, 1.0), (0.0, 1.0)])
def test_intervals_cover_what_they_promise(divisions, seeds, between, within):
    dice = random.Random(f"{divisions} {seeds} {between}")
    covered = 0
    for _ in range(1000):
        ours, theirs = drawn(dice, divisions, seeds, between if divisions > 1 else 0.0, within, shift=0.5)
        middle, half = paired(ours, theirs)
        covered += abs(middle - 0.5) <= half
    assert abs(covered / 1000 - 0.95) < 0.02


def test_seeds_of_one_division_say_nothing_of_another():
    dice = random.Random(0)
    missed = 0
    for _ in range(500):
        middle, half = paired(*drawn(dice, 1, 3, between=1.0, within=0.1))
        missed += abs(middle) > half
    assert missed > 250


def test_what_few_numbers_say():
    one, two = Repetition(0, 0), Repetition(0, 1)
    assert paired({one: 1.0}, {one: 0.0}) == (1.0, math.inf)
    assert paired({one: 1.0}, {two: 0.0}) is None
    assert paired({one: 2.0, two: 2.0}, {one: 1.0, two: 1.0}) == (1.0, 0.0)
    assert mark({one: 2.0, two: 2.0}, {one: 1.0, two: 1.0}, larger_is_better=True) == "+"
    assert mark({one: 1.0, two: 1.0}, {one: 1.0, two: 1.0}, larger_is_better=True) == ""


def test_differences_are_marked_repetition_by_repetition():
    seeds = [Repetition(0, seed) for seed in range(3)]
    reference = dict(zip(seeds, (0.50, 0.60, 0.70), strict=True))  # far apart from one another
    better = dict(zip(seeds, (0.52, 0.625, 0.73), strict=True))  # .020, .025, .030: the interval is .013 to .037
    assert mark(better, reference, larger_is_better=True) == "+"
    assert mark(better, reference, larger_is_better=False) == "-"
    assert mark(reference, better, larger_is_better=True) == "-"
    assert mark(dict(zip(seeds, (0.6, 0.6, 0.7), strict=True)), reference, larger_is_better=True) == ""
    # Nine runs of three divisions: seeds agree, divisions do not.
    many = {Repetition(division, seed): number for division, number in enumerate((0.1, 0.3, -0.2)) for seed in range(3)}
    assert mark(many, dict.fromkeys(many, 0.0), larger_is_better=True) == ""


def test_quantiles_are_those_of_student():
    stats = pytest.importorskip("scipy.stats")
    for count in (*range(2, 40), 100, 1000):
        numbers = {Repetition(0, seed): float(seed) for seed in range(count)}
        zero = dict.fromkeys(numbers, 0.0)
        sem = stats.sem(list(numbers.values()))
        assert paired(numbers, zero)[1] / sem == pytest.approx(stats.t.ppf(0.975, count - 1), abs=1e-6)
