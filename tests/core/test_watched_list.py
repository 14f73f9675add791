# SPDX-License-Identifier: Apache-2.0
"""Lists that may only be added to: every other use is noted, also by functions in C."""

import copy
import json
from collections import deque

import numpy as np
import pytest
import torch

from fl_lightning.core.module_state import refill
from fl_lightning.core.watched_list import WatchedDeque, WatchedList

ADDS = {
    "append": lambda x: x.append(torch.ones(())),
    "extend": lambda x: x.extend(torch.ones(()) for _ in range(2)),
    "+=": lambda x: x.__iadd__([1, 2]),
    "last": lambda x: (x.append(3), x[-1]),
    "kind": lambda x: isinstance(x, (list, deque)) and x is not None,
}
READS = {
    "len": len,
    "truth": bool,
    "for": lambda x: [*x],
    "in": lambda x: 3 in x,
    "sum": sum,
    "first": lambda x: x[0],
    "before": lambda x: (x.append(3), x[-2]),
    "pop": lambda x: x.pop(),
    "clear": lambda x: x.clear(),
    "stack": lambda x: torch.stack(x),
    "stacked after": lambda x: (x.append(torch.ones(())), torch.stack(x)),
    "mean": lambda x: np.mean(x),
    "repr": repr,
    "equal": lambda x: x == [],
    "deep copy": copy.deepcopy,
    "copied and added up": lambda x: sum(copy.copy(x)),
    "json": json.dumps,
    "sorted": sorted,
}


REFUSED = ("stack", "stacked after", "json")  # deques, whatever is in them


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        *((WatchedList, use) for use in (*ADDS, *READS)),
        *((WatchedDeque, u) for u in (*ADDS, *READS) if u not in REFUSED),
    ],
)
def test_what_is_noted(kind, use):
    items = kind()
    items.empty()
    try:
        (ADDS | READS)[use](items)
    except Exception:
        assert use in READS
    assert items.was_read == (use in READS)
    items.empty()
    assert not items.was_read
    assert items.added() == []


@pytest.mark.parametrize("kind", [WatchedList, WatchedDeque])
def test_putting_things_back_is_no_use(kind):
    items = kind()
    items.empty()
    items.append(1)
    before = copy.copy(items)
    items.append(2)
    refill(items, before)
    assert items.added() == [1]
    assert not items.was_read
