# SPDX-License-Identifier: Apache-2.0
"""All that a module holds beside its parameters: every change is seen, and undone as often as needed."""

import threading
from collections import OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from support import Classifier, fresh
from torch import nn
from torchmetrics import MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryPrecision

from fl_lightning.lightning.module.snapshot import ModuleSnapshot


class Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class Locked:
    def __init__(self):
        self.lock, self.rows = threading.Lock(), []


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
        self.slots, self.method, self.locked = Slotted(), self.forward, Locked()
        self.register_buffer("seen", torch.zeros(()))
        self.metric, self.pair = SumMetric(), MetricCollection([BinaryAccuracy(), BinaryPrecision()])
        self.wrapped = MinMaxMetric(BinaryAccuracy())
        self.hidden = {"sum": SumMetric(), "wrapped": MinMaxMetric(BinaryAccuracy())}


ONES = torch.ones(3), torch.ones(3, dtype=torch.int64)
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
    "locked": lambda m: m.locked.rows.append(1),
    "seen": lambda m: m.seen.add_(1),
    "net.1.num_batches_tracked": lambda m: setattr(m.net[1], "num_batches_tracked", torch.ones(())),
    "late": lambda m: m.register_buffer("late", torch.ones(())),
    "part": lambda m: setattr(m, "part", nn.Linear(2, 2)),
    "fresh": lambda m: setattr(m, "fresh", 1),
    "wrapped": lambda m: m.wrapped.update(*ONES),
    "hidden": lambda m: m.hidden["wrapped"].update(*ONES),
}
INSIDE = {f"wrapped._base_metric.{name}" for name in ("tp", "_update_count")}
TOGETHER = {
    "wrapped": INSIDE, "array": {"array", "row"}, "tensor": {"tensor", "view"}, "view": {"tensor", "view"},
}  # fmt: skip


def content(module):
    """All that the changes above touch, and what metrics have come to."""
    plain = [module.number, module.text, module.items, module.queue, module.table, dict(module.lists), module.order]
    large = module.array.tobytes(), module.row.tobytes(), tuple(module.scores)
    rest = [module.slots.count, module.locked.rows, sorted(module.state_dict()), hasattr(module, "fresh")]
    tensors = [module.tensor.tolist(), module.view.tolist(), float(module.seen), int(module.net[1].num_batches_tracked)]
    metrics = [module.metric, *module.pair.values(copy_state=False), *module.hidden.values(), module.wrapped]
    inner = [module.wrapped._base_metric, module.hidden["wrapped"]._base_metric]
    counts = [(metric._update_count, metric.metric_state) for metric in (*metrics, *inner)]
    small = plain, rest, tensors, counts, float(module.wrapped.max_val), module.pair._groups_checked
    return repr(small), large


def changed_names(state):
    return {name for kept in state.changed() for name in kept.changed_names()}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_undone(name, inference):
    with torch.inference_mode(inference):
        module = fresh(Stateful)
        state, before = ModuleSnapshot(module, whole=True), content(module)
        assert changed_names(state) == set()
        for _ in range(2):
            CHANGES[name](module)
            assert changed_names(state) == TOGETHER.get(name, {name})
            assert content(module) != before
            state.put()
            assert content(module) == before


def test_metrics_start_from_zero_and_come_back():
    module = fresh(Stateful)
    for metric in (module.wrapped, module.pair, module.hidden["wrapped"]):
        metric.update(*ONES)
    module.metric.update(2.0)
    module.wrapped.compute()
    state, before = ModuleSnapshot(module, whole=True), content(module)
    for _ in range(2):  # updates in place do not reach what is remembered
        state.empty_metrics()
        assert module.wrapped._base_metric._update_count == 0
        module.metric.update(1.0)
        assert module.metric.compute() == 1
        module.pair.update(ONES[0], 1 - ONES[1])
        assert module.pair.compute()["BinaryPrecision"] == 0
        assert {metric.compute().item() for metric in module.pair.values()} == {0}
        state.put()
        assert content(module) == before
    module.metric.update(1.0)
    assert changed_names(state) == set()  # states that can be joined are no concern
    assert module.metric.compute() == 3
    assert module.pair.compute()["BinaryPrecision"] == 1


@pytest.mark.parametrize(
    ("made", "is_same"),
    [
        (lambda: float("0.3"), True),
        (lambda: float("nan"), True),
        (lambda: torch.ones(2).shape, True),
        (lambda: (1000, torch.ones(2)), True),
        (lambda: torch.rand(2), False),
        (lambda: [1], False),
        (lambda: object(), False),
    ],
)
def test_what_is_made_again_means_the_same(made, is_same):
    module = nn.Module()
    module.cached = made()
    state = ModuleSnapshot(module, whole=True)
    module.cached = made()
    assert [kept.edits() == [] for kept in state.changed()] == [is_same]
    module.cached = None
    assert [kept.edits() == [] for kept in state.changed()] == [False]
