# SPDX-License-Identifier: Apache-2.0
"""What a comparison of two moments of an object notices."""

from collections import deque

import numpy as np
import pytest
import torch

from fl_lightning.lightning.module.fingerprint import Fingerprint


class Helper:
    """Refers to itself."""

    def __init__(self):
        self.own, self.count = self, 0


def taken(value):
    found = Fingerprint()
    found.add("value", value)
    return found


LONG = {
    "a list": (lambda: [0] * 600, lambda long: long.__setitem__(300, 1)),
    "a deque": (lambda: deque(range(600)), lambda long: long.rotate(1)),
    "a dictionary": (lambda: dict.fromkeys(range(600), 0.0), lambda long: long.update({300: 1.0})),
    "a set": (lambda: set(range(600)), lambda long: long.symmetric_difference_update({300, 600})),
    "lists in a list": (lambda: [[0] for _ in range(600)], lambda long: long[300].append(1)),
    "lists in a dictionary": (lambda: {k: [0] for k in range(600)}, lambda long: long[300].append(1)),
    "tensors in a list": (lambda: [torch.zeros(1) for _ in range(600)], lambda long: long.reverse()),
    "what is in tensors": (lambda: [torch.zeros(1) for _ in range(600)], lambda long: long[300].add_(1)),
    "what is in objects": (lambda: [Helper() for _ in range(600)], lambda long: setattr(long[300], "count", 1)),
    "very many tensors": (lambda: [torch.zeros(1) for _ in range(6000)], lambda long: long.reverse()),
    "arrays in a list": (lambda: [np.zeros(1) for _ in range(600)], lambda long: long[300].fill(1)),
    "an array": (lambda: np.zeros(600_000), lambda long: long.__setitem__(300_000, 1)),
    "a view": (lambda: np.zeros((600, 600)).T, lambda long: long.__setitem__((300, 300), 1)),
}


@pytest.mark.parametrize("kind", LONG)
def test_one_of_many_items_counts(kind):
    make, change = LONG[kind]
    value = make()
    before = taken(value)
    assert before.changes(taken(value)) == []
    change(value)
    assert before.changes(taken(value)) == ["value"]
