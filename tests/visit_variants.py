# SPDX-License-Identifier: Apache-2.0
"""Many small modules that keep something from step to step, each with weights of its own, trained side by side.

``LOST`` keep what no message holds: every visit begins as the fit did. ``REFUSED`` change what no visit may change.
"""

from __future__ import annotations

import argparse
import array
import copy
import enum
import queue
import random
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import MeanMetric, MetricCollection, MinMaxMetric, RunningMean, SumMetric
from torchmetrics.classification import BinaryAccuracy

WIDTH = 3


class Variant(nn.Module):
    """Keeps something; its loss depends on that."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.start()

    def start(self):
        """Makes what is kept."""

    def scale(self, x):
        """A number near one that the step's state gives, which it changes."""
        return 1.0

    def forward(self, x, y):
        return ((self.scale(x) * (x @ self.w) - y) ** 2).mean()


class Classes:
    """Where pickles find the classes of variants."""


def class_of(name, members):
    kind = type(name, (Variant,), {**members, "__qualname__": f"{Classes.__name__}.{name}", "__module__": __name__})
    setattr(Classes, name, kind)
    return kind


VARIANTS: dict[str, type[Variant]] = {}


def variant(start, scale, name=None):
    """Makes a variant of two functions."""
    name = name or scale.__name__
    VARIANTS[name] = class_of(name, {"start": start, "scale": scale})


def keeps(**made):
    """Starts with attributes that are made by functions."""

    def start(self):
        for name, make in made.items():
            setattr(self, name, make())

    return start


def named(start):
    return lambda scale: variant(start, scale)


class Meter:
    """An average as many projects have it."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.total, self.count = self.total + value, self.count + 1
        return self.total / self.count


class Slotted:
    __slots__ = ("__value",)

    def __init__(self):
        self.__value = 1.0

    def grow(self):
        self.__value *= 1.02
        return self.__value


@dataclass
class Record:
    step: int = 0
    seen: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    table: dict[str, float] = field(default_factory=lambda: {"a": 1.0})


class Pair(NamedTuple):
    count: int
    items: list[float]


class Settings(dict):
    extra = 1.0


def mean(x):
    return float(x.detach().mean())


# ---- numbers


@named(keeps(n=int))
def counts_steps(self, x):
    self.n += 1
    return 1 + 0.01 * self.n


@named(keeps(t=lambda: 1.0))
def anneals(self, x):
    self.t *= 0.98
    return self.t


@named(keeps(n=int))
def anneals_where_a_batch_is_short(self, x):
    self.n += len(x) < 5
    return 0.9**self.n


@named(keeps(mode=lambda: "a"))
def turns_a_string(self, x):
    self.mode = {"a": "b", "b": "c", "c": "a"}[self.mode]
    return {"a": 1.0, "b": 1.1, "c": 0.9}[self.mode]


@named(keeps(last=lambda: None))
def has_none_at_first(self, x):
    before, self.last = self.last, mean(x)
    return 1.0 if before is None else 1 + 0.1 * before


@named(keeps(z=lambda: 1 + 0j))
def turns_a_complex_number(self, x):
    self.z *= 0.6 + 0.8j
    return 1 + 0.1 * self.z.real


@named(keeps())
def makes_an_attribute(self, x):
    self.made = getattr(self, "made", 0) + 1
    return 1 + 0.01 * self.made


@named(keeps(made=lambda: 1.0))
def deletes_an_attribute(self, x):
    if hasattr(self, "made"):
        del self.made
        return 1.2
    return 1.0


# ---- tensors and arrays


@named(keeps(t=lambda: torch.ones(())))
def changes_a_tensor(self, x):
    self.t.mul_(0.98)
    return self.t.clone()


@named(keeps(t=lambda: torch.ones(())))
def binds_a_tensor(self, x):
    self.t = self.t * 0.98
    return self.t


@named(keeps(t=lambda: torch.ones(2**16 + 4)))
def writes_through_data(self, x):
    self.t.data[5:].mul_(0.98)
    return float(self.t[-1])


@named(keeps(t=lambda: torch.ones(2**16 + 4)))
def writes_through_numpy(self, x):
    self.t.numpy()[7] *= 0.98
    return float(self.t[7])


@named(keeps(a=lambda: np.ones(4)))
def changes_an_array(self, x):
    self.a[2] *= 0.98
    return float(self.a[2])


@named(keeps(a=lambda: np.array([[1.0], None], dtype=object)))
def changes_an_array_of_objects(self, x):
    self.a[0][0] *= 0.98
    return self.a[0][0]


@named(keeps(a=lambda: array.array("d", [1.0])))
def changes_a_plain_array(self, x):
    self.a[0] *= 0.98
    return self.a[0]


@named(keeps(b=lambda: bytearray(b"\1")))
def changes_bytes(self, x):
    self.b[0] += 1
    return 1 + 0.01 * self.b[0]


@named(keeps(last=lambda: torch.zeros(())))
def keeps_the_loss_with_its_graph(self, x):
    before, self.last = self.last, (x @ self.w).mean()
    return 1 + 0.1 * before.detach()


@named(keeps(bank=lambda: torch.ones(6), row=lambda: torch.ones(())))
def keeps_a_view(self, x):
    self.bank[1] *= 0.98
    self.row = self.bank[1]
    return float(self.row)


@named(keeps(last=lambda: None))
def keeps_a_view_of_its_weights(self, x):
    before = self.last
    self.last = self.w.data[:2]
    return 1.0 if before is None else 1 + 0.1 * float(before.sum())


@named(keeps(seen=list))
def gathers_views_of_its_weights(self, x):
    self.seen.append(self.w.data[:2])
    return 1 + 0.1 * float(self.seen[max(len(self.seen) - 2, 0)].sum())


@named(keeps(t=lambda: torch.eye(3).to_sparse()))
def changes_a_sparse_tensor(self, x):
    self.t.mul_(0.98)
    return float(self.t.to_dense()[1, 1])


@named(keeps(t=lambda: torch.ones(1)))
def grows_a_tensor(self, x):
    self.t = torch.cat([self.t, self.t[-1:] * 0.98])
    return float(self.t[-1])


@named(keeps(t=lambda: torch.ones(1)))
def grows_a_tensor_in_place(self, x):
    self.t.data = torch.cat([self.t, self.t[-1:] * 0.98])
    return float(self.t[-1])


@named(keeps(t=lambda: torch.tensor(float("nan"))))
def has_nan(self, x):
    before, self.t = self.t, x.detach().mean()
    return 1.0 if before.isnan() else 1 + 0.1 * before


# ---- containers and objects


@named(keeps(seen=list))
def gathers_in_a_list(self, x):
    self.seen.append(mean(x))
    return 1 + 0.01 * len(self.seen) + 0.1 * self.seen[0]


@named(keeps(seen=lambda: [0] * 600))
def counts_in_a_long_list(self, x):
    self.seen[300] += 1
    return 1 + 0.01 * self.seen[300]


@named(keeps(seen=deque))
def gathers_in_a_deque(self, x):
    self.seen.append(mean(x))
    return 1 + 0.1 * self.seen[0]


@named(keeps(seen=lambda: deque(maxlen=4)))
def keeps_the_last_few(self, x):
    self.seen.append(mean(x))
    return 1 + 0.1 * sum(self.seen) / len(self.seen)


@named(keeps(seen=list))
def keeps_a_window_in_a_list(self, x):
    self.seen.append(mean(x))
    if len(self.seen) > 3:
        self.seen.pop(0)
    return 1 + 0.1 * self.seen[0]


@named(keeps(seen=list))
def binds_a_longer_list(self, x):
    self.seen = [*self.seen[-3:], mean(x)]
    return 1 + 0.1 * self.seen[0]


@named(keeps(cache=dict))
def caches(self, x):
    known = len(self.cache)
    self.cache[round(mean(x), 3)] = x.detach().mean()
    return 1 + 0.01 * known


@named(keeps(lists=lambda: defaultdict(list)))
def gathers_by_name(self, x):
    self.lists["a"].append(mean(x))
    return 1 + 0.01 * len(self.lists["a"])


@named(keeps(counts=Counter))
def counts_by_name(self, x):
    self.counts["a"] += 1
    return 1 + 0.01 * self.counts["a"]


@named(keeps(table=lambda: {1: None}))
def renames_a_key(self, x):
    ((key, value),) = self.table.items()
    del self.table[key]
    self.table[key + 1] = value
    return 1 + 0.01 * key


@named(keeps(order=lambda: OrderedDict(a=1.0, b=1.1, c=0.9)))
def moves_to_the_end(self, x):
    self.order.move_to_end(next(iter(self.order)))
    return next(iter(self.order.values()))


@named(keeps(seen=set))
def gathers_in_a_set(self, x):
    self.seen.add(round(mean(x), 2))
    return 1 + 0.01 * len(self.seen)


@named(keeps(nested=lambda: {"a": [{"n": 0}], "b": (1, [0])}))
def counts_deep_inside(self, x):
    self.nested["a"][0]["n"] += 1
    self.nested["b"][1][0] += 2
    return 1 + 0.01 * (self.nested["a"][0]["n"] + self.nested["b"][1][0])


@named(keeps(pair=lambda: Pair(0, [1.0])))
def keeps_a_named_tuple(self, x):
    self.pair = Pair(self.pair.count + 1, self.pair.items)
    self.pair.items[0] *= 0.98
    return self.pair.items[0] + 0.01 * self.pair.count


@named(keeps(record=Record))
def keeps_a_dataclass(self, x):
    self.record.step += 1
    self.record.seen.append(mean(x))
    return 1 + 0.01 * self.record.step + 0.1 * self.record.seen[0]


@named(keeps(record=Frozen))
def keeps_a_frozen_dataclass(self, x):
    self.record.table["a"] *= 0.98
    return self.record.table["a"]


@named(keeps(space=lambda: SimpleNamespace(n=0)))
def keeps_a_namespace(self, x):
    self.space.n += 1
    return 1 + 0.01 * self.space.n


@named(keeps(meter=Meter))
def averages_in_an_object(self, x):
    return 1 + 0.1 * self.meter.update(mean(x))


@named(keeps(held=Slotted))
def counts_in_slots(self, x):
    return self.held.grow()


@named(keeps(settings=Settings))
def changes_the_attribute_of_a_dictionary(self, x):
    self.settings.extra *= 0.98
    return self.settings.extra


@named(keeps(function=lambda: partial(dict, value=[1.0])))
def changes_what_a_partial_holds(self, x):
    self.function.keywords["value"][0] *= 0.98
    return self.function()["value"][0]


def _twice(self):
    self.one = self.other = [1.0]


@named(_twice)
def has_two_names_for_one_list(self, x):
    self.one[0] *= 0.98
    return self.other[0]


def _ring(self):
    self.ring = [1.0]
    self.ring.append(self.ring)


@named(_ring)
def holds_itself(self, x):
    self.ring[1][0] *= 0.98
    return self.ring[0]


# ---- modules, buffers, generators, metrics


def _teacher(self):
    torch.manual_seed(1)
    self.teachers = [nn.Linear(WIDTH, 1)]


@named(_teacher)
def moves_a_hidden_teacher(self, x):
    with torch.no_grad():
        self.teachers[0].weight.mul_(0.98)
        return 1 + 0.1 * self.teachers[0](x).mean()


def _statistics(self):
    self.norms = [nn.BatchNorm1d(WIDTH)]


@named(_statistics)
def has_hidden_statistics(self, x):
    self.norms[0](x)
    return 1 + 0.1 * float(self.norms[0].running_mean.sum()) + 0.01 * int(self.norms[0].num_batches_tracked)


def _integers(self):
    self.register_buffer("n", torch.zeros((), dtype=torch.long))


@named(_integers)
def counts_in_a_buffer(self, x):
    self.n += 1
    return 1 + 0.01 * int(self.n)


def _bank(self):
    self.register_buffer("bank", torch.zeros(8, 2))
    self.at = 0


def _push(self, x):
    for row in x.detach()[:, :2]:
        self.bank[self.at] = row
        self.at = (self.at + 1) % len(self.bank)
    return 1 + 0.1 * float(self.bank.sum())


variant(_bank, _push, "keeps_a_memory_bank")


def _moco(self):
    self.register_buffer("bank", torch.zeros(2, 64), persistent=False)
    self.register_buffer("at", torch.zeros(1, dtype=torch.long))


@named(_moco)
def keeps_a_queue_of_columns(self, x):
    at = int(self.at)
    for place, row in enumerate(x.detach()[:, :2]):
        self.bank[:, (at + place) % 64] = row
    self.at[0] = (at + len(x)) % 64
    return 1 + 0.1 * float(self.bank.sum())


@named(keeps(g=lambda: torch.Generator().manual_seed(3)))
def draws_from_torch(self, x):
    return 1 + 0.1 * float(torch.rand((), generator=self.g))


@named(keeps(g=lambda: np.random.default_rng(3)))
def draws_from_numpy(self, x):
    return 1 + 0.1 * self.g.random()


@named(keeps(g=lambda: np.random.RandomState(3)))
def draws_from_old_numpy(self, x):
    return 1 + 0.1 * self.g.rand()


@named(keeps(g=lambda: random.Random(3)))
def draws_from_python(self, x):
    return 1 + 0.1 * self.g.random()


@named(keeps(m=MeanMetric))
def asks_a_mean(self, x):
    self.m.update(x.detach().mean())
    return 1 + 0.1 * self.m.compute()


@named(keeps(m=lambda: MetricCollection({"acc": BinaryAccuracy(), "sum": SumMetric()}, compute_groups=False)))
def asks_a_collection(self, x):
    self.m["acc"].update((x[:, 0] > 0).long(), (x[:, 1] > 0).long())
    self.m["sum"].update(1.0)
    return 1 + 0.1 * self.m["acc"].compute() + 0.01 * self.m["sum"].compute()


@named(keeps(ms=lambda: {"a": SumMetric()}))
def asks_a_hidden_metric(self, x):
    self.ms["a"].update(1.0)
    return 1 + 0.01 * self.ms["a"].compute()


@named(keeps(drop=lambda: nn.Dropout(0.5)))
def ends_dropout(self, x):
    self.drop.eval()
    return 1 + 0.1 * self.drop(x).mean()


@named(keeps(drop=lambda: nn.Dropout(0.0)))
def counts_in_a_mode(self, x):
    before = self.drop.training
    self.drop.eval()
    return 1.1 if before else 1.0


def _settings(self):
    self.settings = argparse.Namespace(rate=1.0, table={"a": [1.0]})


@named(_settings)
def anneals_in_a_namespace(self, x):
    self.settings.rate *= 0.98
    self.settings.table["a"][0] += 0.01
    return self.settings.rate * self.settings.table["a"][0]


class Phase(enum.Enum):
    WARM, HOT = 1, 2


@named(keeps(phase=lambda: Phase.WARM))
def turns_an_enum(self, x):
    before, self.phase = self.phase, Phase.HOT
    return before.value


@named(keeps(shape=lambda: None))
def remembers_a_shape(self, x):
    before, self.shape = self.shape, x.shape
    return 1.0 if before is None else 1 + 0.1 * before[0]


@named(keeps(dtype=lambda: torch.float32, device=lambda: None))
def remembers_a_dtype(self, x):
    before, self.dtype, self.device = self.dtype, torch.float64, x.device
    return 1.1 if before == torch.float32 else 1.0


class Waiting(queue.Queue):
    def __deepcopy__(self, memo):
        made = Waiting()
        made.queue.extend(self.queue)
        return made


@named(keeps(waiting=Waiting))
def keeps_a_queue(self, x):
    self.waiting.put(mean(x))
    return 1 + 0.1 * self.waiting.queue[0]


def _average(self):
    self.average = self.w.detach().clone()


@named(_average)
def averages_its_weights(self, x):
    self.average.lerp_(self.w.detach(), 0.1)
    return 1 + 0.1 * self.average.sum()


@named(keeps(m=lambda: RunningMean(3)))
def asks_a_running_mean(self, x):
    self.m.update(x.detach().mean())
    return 1 + 0.1 * self.m.compute()


@named(keeps(ms=lambda: [MinMaxMetric(SumMetric())]))
def asks_a_hidden_wrapper(self, x):
    self.ms[0].update(x.detach().mean())
    return 1 + 0.1 * self.ms[0].compute()["max"]


# ---- what torch has for it


def _second(kind, **options):
    def start(self):
        torch.manual_seed(2)
        self.alpha = torch.ones(1, requires_grad=True)
        self.second = kind([self.alpha], **options)

    return start


def _steps(self, x):
    loss = (self.alpha * x.detach()).square().mean()
    self.second.zero_grad()
    loss.backward()
    self.second.step()
    return 1 + 0.1 * self.alpha.detach()


variant(_second(torch.optim.Adam, lr=0.05), _steps, "steps_a_second_adam")
variant(_second(torch.optim.SGD, lr=0.05, momentum=0.9), _steps, "steps_a_second_sgd")


def _schedule(self):
    _second(torch.optim.SGD, lr=0.1)(self)
    self.schedule = torch.optim.lr_scheduler.StepLR(self.second, 1, 0.7)


@named(_schedule)
def steps_a_schedule(self, x):
    scale = _steps(self, x)
    self.schedule.step()
    return scale


def _scaler(self):
    _second(torch.optim.SGD, lr=0.05)(self)
    self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)


@named(_scaler)
def scales_its_gradients(self, x):
    loss = (self.alpha * x.detach()).square().mean()
    self.second.zero_grad()
    self.scaler.scale(loss).backward()
    self.scaler.step(self.second)
    self.scaler.update()
    return 1 + 0.01 * self.scaler.get_scale() + 0.1 * self.alpha.detach()


class Memory(Dataset):
    def __init__(self):
        self.items = []

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@named(keeps(memory=Memory))
def remembers_in_a_data_set(self, x):
    self.memory.items.append(mean(x))
    return 1 + 0.1 * self.memory[0]


# ---- what no message holds


@named(_teacher)
def replaces_a_hidden_teacher(self, x):
    self.teachers = [copy.deepcopy(self.teachers[0])]
    with torch.no_grad():
        self.teachers[0].bias.add_(0.01)
        return 1 + 0.1 * self.teachers[0](x).mean()


@named(keeps(draw=lambda: None))
def keeps_a_distribution(self, x):
    before, self.draw = self.draw, torch.distributions.Normal(mean(x), 1.0)
    return 1.0 if before is None else 1 + 0.1 * before.mean


@named(keeps(function=lambda: None))
def keeps_a_function(self, x):
    before, self.function = self.function, lambda: 2.0
    return 1.0 if before is None else before()


@named(keeps())
def makes_an_optimizer(self, x):
    if not hasattr(self, "second"):
        _second(torch.optim.SGD, lr=0.1)(self)
    return _steps(self, x)


def _cached(self):
    self.lin = nn.Linear(WIDTH, 1)


@named(_cached)
def makes_a_cache(self, x):
    if not hasattr(self.lin, "cache"):
        self.lin.register_buffer("cache", torch.ones(()), persistent=False)
    self.lin.cache *= 0.98
    return self.lin.cache


LOST = {
    "replaces_a_hidden_teacher": "teachers (a Linear)",
    "keeps_a_distribution": "draw (a Normal)",
    "keeps_a_function": "function (a function)",
    "makes_an_optimizer": "second (a SGD)",
    "makes_a_cache": "lin.cache (register it in __init__)",
}

# ---- what no visit may change


def refused(start, changes, scale):
    """A variant of its own fit."""
    made = {"start": start, "scale": scale, "changes": changes}
    REFUSED[scale.__name__] = class_of(scale.__name__, made)


REFUSED: dict[str, type[Variant]] = {}


def adds_a_hook(self, x):
    self.lin.register_forward_hook(lambda module, args, output: 2 * output)
    return 1.0


def adds_a_parameter_hook(self, x):
    self.w.register_hook(lambda grad: 2 * grad)
    return 1.0


def adds_a_hook_after_gradients(self, x):
    self.w.register_post_accumulate_grad_hook(lambda parameter: None)
    return 1.0


def replaces_its_loss(self, x):
    self.lin = nn.Tanh()
    return 1.0


def adds_a_layer(self, x):
    self.more = nn.Tanh()
    return 1.0


def removes_a_layer(self, x):
    if hasattr(self, "lin"):
        del self.lin
    return 1.0


def writes_into_a_data_set(self, x):
    self.samples.tensors[0].add_(1)
    return 1.0


refused(keeps(lin=nn.Identity), "lin._forward_hooks", adds_a_hook)
refused(keeps(), "w._backward_hooks", adds_a_parameter_hook)
refused(keeps(), "w._post_accumulate_grad_hooks", adds_a_hook_after_gradients)
refused(keeps(lin=nn.Identity), "lin", replaces_its_loss)
refused(keeps(), "more", adds_a_layer)
refused(keeps(lin=nn.Identity), "lin", removes_a_layer)
refused(keeps(samples=lambda: TensorDataset(torch.zeros(4, 2))), "samples", writes_into_a_data_set)


class Together(L.LightningModule):
    """All variants, in one fit."""

    def __init__(self, names=None):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict({name: (VARIANTS | REFUSED)[name]() for name in names or VARIANTS})

    def training_step(self, batch, batch_idx):
        x, y = batch
        return sum(part(x, y) for part in self.parts.values())

    def on_train_epoch_end(self):
        for name in {"asks_a_mean", "asks_a_collection"} & self.parts.keys():
            self.parts[name].m.reset()
        if "asks_a_hidden_metric" in self.parts:
            self.parts["asks_a_hidden_metric"].ms["a"].reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def found(self):
        """The weights by variant."""
        return {name: part.w.detach().clone() for name, part in self.parts.items()}
