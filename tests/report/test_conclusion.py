# SPDX-License-Identifier: Apache-2.0
"""What a comparison comes to, from its numbers."""

import re
from dataclasses import replace

import pytest

from fl_lightning.report.conclusion import LOCAL, POOLED, conclude
from fl_lightning.report.number_formats import duration, notation, number, spread
from fl_lightning.report.repetitions import Estimate, Repetition
from fl_lightning.report.tables import MethodSummary

# By row, the worst client's value and the mean, seed by seed.
OPPOSITE = {
    "FedAvg": ((0.09, 0.102), (0.58, 0.60)),
    "QFedAvg": ((0.32, 0.334), (0.55, 0.57)),
    LOCAL: ((0.70, 0.718), (0.81, 0.82)),
    POOLED: ((0.10, 0.12), (0.60, 0.62)),
}


def repeated(numbers):
    return {Repetition(0, seed): number for seed, number in enumerate(numbers)}


def concluded(rows, mode="max", **changes):
    made = [
        MethodSummary(
            name, name if name in (LOCAL, POOLED) else "", numbers={"worst": repeated(worst), "mean": repeated(mean)}
        )
        for name, (worst, mean) in rows.items()
    ]
    return conclude([replace(one, **changes.get(one.method, {})) for one in made], "acc", mode)


def test_the_best_method_stands_against_the_bounds_and_the_best_other_one_against_the_first():
    assert concluded(OPPOSITE) == [
        "With QFedAvg instead of local only, whoever is worst goes from acc 0.709 ± 0.013 to 0.327 ± 0.010 (worse), "
        "and the mean from 0.815 ± 0.007 to 0.560 ± 0.014 (worse).",
        "With QFedAvg instead of pooled, whoever is worst goes from acc 0.110 ± 0.014 to 0.327 ± 0.010 (better), "
        "and the mean from 0.610 ± 0.014 to 0.560 ± 0.014 (worse).",
        "With QFedAvg instead of FedAvg, whoever is worst goes from acc 0.096 ± 0.008 to 0.327 ± 0.010 (better), "
        "and the mean from 0.590 ± 0.014 to 0.560 ± 0.014 (worse).",
    ]  # fmt: skip


WEAK = ((0.40, 0.41), (0.60, 0.61))
GOOD = ((0.50, 0.51), (0.70, 0.71))
LOSS = ((2.0, 2.1), (1.0, 1.01))


@pytest.mark.parametrize(
    ("rows", "mode", "says"),
    [
        ({"A": GOOD, "B": WEAK, "C": LOSS}, "max", [("C", "A", "better", "better")]),
        ({"A": LOSS, "B": WEAK, "C": GOOD, LOCAL: GOOD}, "min", [("B", LOCAL, "better", "better"),
                                                                 ("B", "A", "better", "better")]),
        ({"A": ((0.4,), (0.6,)), "B": ((0.5,), (0.7,))}, "max", [("B", "A", "may be chance", "may be chance")]),
        ({"A": GOOD, "B": ((), ()), POOLED: ((), ())}, "max", []),
        ({LOCAL: GOOD, POOLED: WEAK}, "max", []),
    ],
)  # fmt: skip
def test_what_is_better_and_what_may_be_chance(rows, mode, says):
    form = re.compile(r"With (.*) instead of (.*), .* \((.*)\), .* \((.*)\)\.")
    assert [form.fullmatch(text).groups() for text in concluded(rows, mode)] == says


def test_numbers_that_are_large_have_fewer_digits():
    (text,) = concluded({"A": ((2e4, 2.1e4), (1.0, 1.0)), "B": ((1e4, 1e4), (1.0, 1.0))}, "min")
    assert "goes from acc 20,500.0 ± 707.1 to 10,000.0 ± 0.0 (better), and the mean from 1.0 ± 0.0" in text


def test_rows_with_values_that_are_not_finite_are_named_and_left_out():
    found = concluded({"A": WEAK, "B": GOOD, "C": WEAK}, B={"not_finite": 1})
    assert found[0] == "With B, a run ends with clients whose acc is not finite."
    assert [text.split(",")[0] for text in found[1:]] == ["With C instead of A"]


def test_numbers_that_are_read_together_have_as_many_digits():
    assert [number(value, notation(column)) for column in ([0.664, 9.95e-4], [3e-5], [5e8]) for value in column] == [
        "0.664", "0.001", "3.00e-05", "5.00e+08",
    ]  # fmt: skip
    assert spread(Estimate(0.664, 9.95e-4), notation([0.717, 3.04e-5])) == "0.664 ± 0.001"
    assert [duration(value) for value in (0.04, 9.96, 59.6, 319.99, 599.6, 6000.0, 21570.0)] == [
        "0.0 s", "10 s", "1 min 0 s", "5 min 20 s", "10 min", "1 h 40 min", "6 h 0 min",
    ]  # fmt: skip
    assert [number(value) for value in (None, 0.0, 12.3456, 12345.67)] == ["-", "0.000", "12.346", "12,345.7"]
