# SPDX-License-Identifier: Apache-2.0
"""Copies of a module's state: complete, independent, comparable, and back in place without a trace."""

import threading
from collections import OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from support import Classifier, fresh
from torch import nn
from torchmetrics import MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.classification import BinaryAccuracy

from fl_lightning.lightning.module.state_copy import StateCopy


class Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class Stateful(Classifier):
    """Keeps a bit of everything."""

    def __init__(self):
        super().__init__(norm=True)
        self.number, self.text, self.items, self.queue = 0, "a", [[]], deque([1])
        self.table, self.lists, self.order = {"a": [1]}, defaultdict(list), OrderedDict(a=1)
        self.array = np.zeros((150, 150))
        self.row = self.array[3]
        self.scores = [0.0] * 50_000
        self.tensor = torch.zeros(4)
        self.view = self.tensor[1:]
        self.slots, self.method, self.function = Slotted(), self.forward, lambda x: x
        self.register_buffer("seen", torch.zeros(()))
        self.metric, self.pair = SumMetric(), MetricCollection([BinaryAccuracy()])
        self.wrapped = MinMaxMetric(BinaryAccuracy())
        self.hidden = {"sum": SumMetric()}
        self.twin = [nn.Linear(2, 2)]


CHANGES = {
    "number": lambda m: setattr(m, "number", 1),
    "text": lambda m: setattr(m, "text", "b"),
    "items": lambda m: m.items[0].append(1),
    "queue": lambda m: m.queue.append(2),
    "table": lambda m: m.table["a"].append(2),
    "lists": lambda m: m.lists["new"].append(1),
    "order": lambda m: m.order.update(b=2),
    "array": lambda m: m.array.__setitem__((3, 7), 1.0),
    "scores": lambda m: m.scores.__setitem__(25_000, 1.0),
    "tensor": lambda m: m.tensor.add_(1),
    "view": lambda m: m.view.data.add_(1),
    "slots": lambda m: setattr(m.slots, "count", 1),
    "seen": lambda m: m.seen.add_(1),
    "net.1.num_batches_tracked": lambda m: m.net[1].num_batches_tracked.add_(1),
    "hidden": lambda m: m.hidden["sum"].update(1.0),
    "fresh": lambda m: setattr(m, "fresh", 1),
}
TOGETHER = {"array": {"array", "row"}, "tensor": {"tensor", "view"}, "view": {"tensor", "view"}}


def content(module):
    """All that the changes above touch."""
    plain = [module.number, module.text, module.items, module.queue, module.table, dict(module.lists), module.order]
    arrays = [module.array.tolist(), module.row.tolist(), module.scores, module.tensor.tolist(), module.view.tolist()]
    rest = [module.slots.count, float(module.seen), int(module.net[1].num_batches_tracked), hasattr(module, "fresh")]
    counts = [module.metric._update_count, module.wrapped._base_metric._update_count, float(module.metric.sum_value)]
    return repr((plain, arrays, rest, counts, module.hidden["sum"]._update_count, float(module.wrapped.max_val)))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_belongs_to_its_copy(name):
    module = fresh(Stateful)
    copy, before = StateCopy(module), content(module)
    assert copy.shared == ()
    assert copy.changes(StateCopy(module)) == []
    for _ in range(2):  # every copy is a fresh one
        with copy.in_place():
            assert content(module) == before
            CHANGES[name](module)
            assert set(copy.changes(StateCopy(module))) == TOGETHER.get(name, {name})
            assert content(module) != before
        assert content(module) == before
    CHANGES[name](module)
    assert set(copy.changes(StateCopy(module))) == TOGETHER.get(name, {name})


def test_what_shared_memory_shares_it_in_the_copy():
    module = fresh(Stateful)
    originals = (module.tensor, module.array, module.metric, module.slots)
    with StateCopy(module).in_place():
        assert module.tensor is not originals[0]
        assert module.array is not originals[1]
        assert module.metric is not originals[2]
        assert module.slots is not originals[3]
        module.tensor[2] = 5
        assert module.view[1] == 5
        module.array[3, 0] = 7
        assert module.row[0] == 7
        assert module.method.__self__ is module
        module.metric.update(2.0)
        module.wrapped.update(torch.ones(3), torch.ones(3, dtype=torch.int64))
        module.wrapped.compute()
        module.pair.update(torch.ones(3), torch.ones(3, dtype=torch.int64))
        assert module.pair.compute()["BinaryAccuracy"] == 1
    assert module.tensor is originals[0]
    assert module.array is originals[1]
    assert module.metric is originals[2]
    assert module.slots is originals[3]
    assert module.metric._update_count == module.pair["BinaryAccuracy"]._update_count == 0
    assert module.wrapped.max_val == -torch.inf


def test_what_cannot_be_copied_is_shared_and_watched():
    module = fresh(Stateful)
    module.lock, module.rows = threading.Lock(), [1]
    known = set()
    copy = StateCopy(module, known=known)
    assert copy.shared == ("lock",)
    with copy.in_place():
        assert module.lock.acquire()
    assert module.lock.locked()
    small = StateCopy(module, small=True)
    assert set(small.shared) == {"lock", "scores"}
    module.lock = threading.Lock()
    assert copy.changes(StateCopy(module, known=known)) == ["lock"]
