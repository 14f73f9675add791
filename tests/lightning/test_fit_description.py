# SPDX-License-Identifier: Apache-2.0
"""Two sides compare what they are about to compute, without a Trainer."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from support import reload

import fl_lightning as fl
from fl_lightning.algorithms import AFL, SCAFFOLD, FedAvg, FedLF, FedProx
from fl_lightning.core.tensors import digest
from fl_lightning.lightning.fit_description import plain


def described(rule, client=None, sizes=(3, 2), **entries):
    layout = fl.ParamLayout.from_sizes(sizes)
    return fl.FitDescription.of(rule, (client or rule).client_rule(), layout, **entries)


DIFFERENCES = {
    "nothing": (FedLF(), FedLF(), {}, {}, ""),
    "method": (FedLF(), FedAvg(), {}, {}, "method: FedLF with ClientRule became FedAvg with ClientRule"),
    "argument": (
        FedLF(), FedLF(max_history=3), {}, {}, "method: FedLF(max_history=None) became FedLF(max_history=3)",
    ),
    "argument of both halves": (
        FedProx(0.1), FedProx(0.2), {}, {}, "method: FedProx(mu=0.1) became FedProx(mu=0.2)",
    ),
    "client half": (
        FedAvg(), FedAvg(), {"client": FedProx(0.1)}, {"client": FedProx(0.2)},
        "method: ProximalTerm(mu=0.1) became ProximalTerm(mu=0.2)",
    ),
    "device": (SCAFFOLD(), SCAFFOLD(control_device="cpu"), {}, {}, ""),
    "layer": (FedAvg(), FedAvg(), {}, {"sizes": (2, 3)}, "layout: parameter 0: layer0 [3] became layer0 [2]"),
    "layers": (FedAvg(), FedAvg(), {}, {"sizes": (3, 2, 1)}, "layout: 2 parameters became 3"),
    "clients": (FedAvg(), FedAvg(), {"clients": 3}, {"clients": 4}, "clients: 3 became 4"),
    "one side does not say": (FedAvg(), FedAvg(), {"clients": 3}, {"data": {"samples": 5}}, ""),
    "data": (
        FedAvg(), FedAvg(), {"data": {"samples": 5, "labels": "blake2b:0"}},
        {"data": {"samples": 6, "labels": "blake2b:1"}}, "data: samples: 5 became 6, other labels",
    ),
    "several": (
        AFL(), AFL(0.1), {"settings": {"seed": 1}, "versions": {"torch": "2.0"}},
        {"settings": {"seed": 2}, "versions": {"torch": "2.1"}},
        "method: AFL(lambda_lr=0.01) became AFL(lambda_lr=0.1); seed: 1 became 2; versions: torch: 2.0 became 2.1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_in_words(name):
    rule, other, mine, theirs, words = DIFFERENCES[name]
    one, two = described(rule, **mine), described(other, **theirs)
    assert one.difference(two) == words
    assert one.difference(one) == two.difference(two) == ""
    assert bool(two.difference(one)) == bool(words)


def test_a_description_survives_a_file():
    one = described(AFL(0.1), clients=3, settings={"seed": 4}, data={"samples": 5})
    state = reload(one.state_dict())
    assert state["seed"] == 4
    assert fl.FitDescription.from_state_dict(state) == one


class Listed:
    """Has no text of its own."""


PLAIN = [
    (np.float64(0.5), 0.5),
    (np.int64(3), 3),
    (np.bool_(True), 1),
    (Fraction(3, 10), 0.3),
    (None, None),
    ((1, (2.0, "a")), [1, [2.0, "a"]]),
    ({1: torch.tensor([1.0])}, {"1": [1.0]}),
    (len, "builtins.len"),
    (FedAvg, "fl_lightning.algorithms.fedavg.FedAvg"),
    (fl.data.UniformSampler(), "UniformSampler()"),
    (Listed(), "Listed"),
    (partial(lambda: 3), "partial"),
]


@pytest.mark.parametrize(("value", "expected"), PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values(value, expected):
    assert plain(value) == expected
    assert type(plain(value)) is type(expected)
    assert reload(plain(value)) == expected


def test_large_values_become_digests():
    large = torch.arange(100.0)
    assert plain(large) == plain(large.clone()) != plain(large + 1)
    assert plain(large).startswith("torch.float32 [100] blake2b:")
    assert plain(list(range(100))) != plain(list(range(1, 101)))


def test_digests_tell_values_dtypes_and_shapes_apart():
    values = [
        torch.zeros(4), torch.zeros(2, 2), torch.zeros(2, dtype=torch.float64), torch.zeros(8, dtype=torch.bfloat16),
        torch.ones(4), np.zeros(4), np.array(["a", "b"]), np.array(["a", "c"], dtype=object), "a", "b", torch.zeros(0),
        torch.tensor(0.0),
    ]  # fmt: skip
    assert len({digest(value) for value in values}) == len(values)
    assert digest("ab", "c") != digest("a", "bc")
    assert digest(torch.arange(6).reshape(2, 3).T) == digest(torch.tensor([[0, 3], [1, 4], [2, 5]]))
