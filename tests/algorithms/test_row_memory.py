# SPDX-License-Identifier: Apache-2.0
"""How many rows a rule remembers unless it is told."""

import pytest
import torch

from fl_lightning.algorithms import FedFV, FedLF, FedMDFG
from fl_lightning.algorithms.records import Federation
from fl_lightning.core.layout import ParamLayout

LIMIT = 8 * 2**30


def federation(clients, cohort=10, layers=20, columns=1000, rounds=None):
    layout = ParamLayout.from_sizes([columns // layers] * layers)
    return Federation(clients, layout, torch.device("cpu"), torch.float32, cohort, rounds)


def planned(rule, fed):
    rule.begin_fit(fed)
    return rule.memory(fed, fed.cohort_size).get(f"{type(rule).__name__}.history", 0)


@pytest.mark.parametrize("rule", [FedLF, lambda **more: FedFV(tau=10_000, **more)])
def test_a_history_beyond_the_limit_is_refused_and_says_what_to_write(rule):
    fed = federation(10_000)
    name = type(rule()).__name__
    with pytest.raises(
        ValueError,
        match=rf"^{name}\(max_history=None\) would remember the rows of 10,000 clients of 10,000 and their products, "
        rf"up to 16,040,000,000 B, more than the 8 GiB that it takes unasked: write {name}\(max_history=7300\), which "
        "fits, or max_history=10000 for all of them",
    ):
        rule().begin_fit(fed)
    for told in (7300, 10_000):
        rule(max_history=told).begin_fit(fed)
    assert planned(rule(max_history=7300), fed) <= LIMIT < planned(rule(max_history=7400), fed)


def test_rows_alone_count_too():
    with pytest.raises(ValueError, match=r"write FedLF\(max_history=84\), which fits"):
        FedLF().begin_fit(federation(100, columns=25_500_000))


@pytest.mark.parametrize("rule", [FedMDFG, FedFV, lambda: FedLF(history_window="last"), lambda: FedFV(tau=0)])
def test_one_round_is_never_too_much(rule):
    rule().begin_fit(federation(1_000_000, cohort=100, columns=40_000_000))


@pytest.mark.parametrize(("rounds", "rows"), [(3, 30), (1000, 7300), (None, 7300)])
def test_the_history_makes_room_for_the_rows_that_the_rounds_bring(rounds, rows):
    rule = FedLF(max_history=7300)
    rule.begin_fit(federation(10_000, rounds=rounds))
    assert (rule.history.reserve, rule.history.capacity) == (rows, 7300)
