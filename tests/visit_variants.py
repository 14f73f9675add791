# SPDX-License-Identifier: Apache-2.0
"""Many small modules that keep something from step to step, each with weights of its own, trained side by side.

``LOST`` keep what no message holds: every visit begins as the fit did. ``REFUSED`` change what no visit may change.
"""

from __future__ import annotations

import argparse
import copy
import enum
import inspect
import queue
import random
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

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


class Settings(dict):
    extra = 1.0


def mean(x):
    return float(x.detach().mean())


# ---- how some of them begin


class Phase(enum.Enum):
    WARM, HOT = 1, 2


class Waiting(queue.Queue):
    def __deepcopy__(self, memo):
        made = Waiting()
        made.queue.extend(self.queue)
        return made


class Memory(Dataset):
    def __init__(self):
        self.items = []

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def _twice(self):
    self.one = self.other = [1.0]


def _ring(self):
    self.ring = [1.0]
    self.ring.append(self.ring)


def _teacher(self):
    torch.manual_seed(1)
    self.teachers = [nn.Linear(WIDTH, 1)]


def _integers(self):
    self.register_buffer("n", torch.zeros((), dtype=torch.long))


def _bank(self):
    self.register_buffer("bank", torch.zeros(8, 2))
    self.at = 0


def _moco(self):
    self.register_buffer("bank", torch.zeros(2, 64), persistent=False)
    self.register_buffer("at", torch.zeros(1, dtype=torch.long))


def _average(self):
    self.average = self.w.detach().clone()


def _second(self, kind=torch.optim.SGD, lr=0.1):
    self.alpha = torch.ones(1, requires_grad=True)
    self.second = kind([self.alpha], lr=lr)


def _adam(self):
    _second(self, torch.optim.Adam, lr=0.05)


def _hidden(self):
    self.hidden = [nn.Parameter(torch.ones(1))]
    self.second = torch.optim.SGD(self.hidden, lr=0.1)


def _schedule(self):
    _second(self)
    self.schedule = torch.optim.lr_scheduler.StepLR(self.second, 1, 0.7)


def _scaler(self):
    _second(self, lr=0.05)
    self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)


def _steps(self, x):
    loss = (self.alpha * x.detach()).square().mean()
    self.second.zero_grad()
    loss.backward()
    self.second.step()
    return 1 + 0.1 * self.alpha.detach()


# ---- the variants


class Kept:
    """A method per variant: it gives a number near one, of what its keywords make, and changes that."""

    def counts_steps(self, x, n=int):
        self.n += 1
        return 1 + 0.01 * self.n

    def anneals(self, x, t=lambda: 1.0):
        self.t *= 0.98
        return self.t

    def anneals_where_a_batch_is_short(self, x, n=int):
        self.n += len(x) < 5
        return 0.9**self.n

    def turns_a_string(self, x, mode=lambda: "a"):
        self.mode = {"a": "b", "b": "c", "c": "a"}[self.mode]
        return {"a": 1.0, "b": 1.1, "c": 0.9}[self.mode]

    def has_none_at_first(self, x, last=lambda: None):
        before, self.last = self.last, mean(x)
        return 1.0 if before is None else 1 + 0.1 * before

    def makes_an_attribute(self, x):
        self.made = getattr(self, "made", 0) + 1
        return 1 + 0.01 * self.made

    def deletes_an_attribute(self, x, made=lambda: 1.0):
        if hasattr(self, "made"):
            del self.made
            return 1.2
        return 1.0

    def changes_a_tensor(self, x, t=lambda: torch.ones(())):
        self.t.mul_(0.98)
        return self.t.clone()

    def binds_a_tensor(self, x, t=lambda: torch.ones(())):
        self.t = self.t * 0.98
        return self.t

    def writes_through_numpy(self, x, t=lambda: torch.ones(2**16 + 4)):
        self.t.numpy()[7] *= 0.98
        return float(self.t[7])

    def changes_an_array(self, x, a=lambda: np.ones(4)):
        self.a[2] *= 0.98
        return float(self.a[2])

    def resizes_an_array(self, x, a=lambda: np.ones(1)):
        self.a.resize(len(self.a) + 1, refcheck=False)
        self.a[-1] = 0.98 * self.a[-2]
        return float(self.a[-1])

    def changes_an_array_of_objects(self, x, a=lambda: np.array([[1.0], None], dtype=object)):
        self.a[0][0] *= 0.98
        return self.a[0][0]

    def keeps_the_loss_with_its_graph(self, x, last=lambda: torch.zeros(())):
        before, self.last = self.last, (x @ self.w).mean()
        return 1 + 0.1 * before.detach()

    def keeps_a_view(self, x, bank=lambda: torch.ones(6), row=lambda: torch.ones(())):
        self.bank[1] *= 0.98
        self.row = self.bank[1]
        return float(self.row)

    def keeps_a_view_of_its_weights(self, x, last=lambda: None):
        before = self.last
        self.last = self.w.data[:2]
        return 1.0 if before is None else 1 + 0.1 * float(before.sum())

    def gathers_views_of_its_weights(self, x, seen=list):
        self.seen.append(self.w.data[:2])
        return 1 + 0.1 * float(self.seen[max(len(self.seen) - 2, 0)].sum())

    def grows_a_tensor(self, x, t=lambda: torch.ones(1)):
        self.t = torch.cat([self.t, self.t[-1:] * 0.98])
        return float(self.t[-1])

    def grows_a_tensor_in_place(self, x, t=lambda: torch.ones(1)):
        self.t.data = torch.cat([self.t, self.t[-1:] * 0.98])
        return float(self.t[-1])

    def has_nan(self, x, t=lambda: torch.tensor(float("nan"))):
        before, self.t = self.t, x.detach().mean()
        return 1.0 if before.isnan() else 1 + 0.1 * before

    def gathers_in_a_list(self, x, seen=list):
        self.seen.append(mean(x))
        return 1 + 0.01 * len(self.seen) + 0.1 * self.seen[0]

    def counts_in_a_long_list(self, x, seen=lambda: [0] * 600):
        self.seen[300] += 1
        return 1 + 0.01 * self.seen[300]

    def gathers_in_a_deque(self, x, seen=deque):
        self.seen.append(mean(x))
        return 1 + 0.1 * self.seen[0]

    def keeps_the_last_few(self, x, seen=lambda: deque(maxlen=4)):
        self.seen.append(mean(x))
        return 1 + 0.1 * sum(self.seen) / len(self.seen)

    def keeps_a_window_in_a_list(self, x, seen=list):
        self.seen.append(mean(x))
        if len(self.seen) > 3:
            self.seen.pop(0)
        return 1 + 0.1 * self.seen[0]

    def binds_a_longer_list(self, x, seen=list):
        self.seen = [*self.seen[-3:], mean(x)]
        return 1 + 0.1 * self.seen[0]

    def caches(self, x, cache=dict):
        known = len(self.cache)
        self.cache[round(mean(x), 3)] = x.detach().mean()
        return 1 + 0.01 * known

    def gathers_by_name(self, x, lists=lambda: defaultdict(list)):
        self.lists["a"].append(mean(x))
        return 1 + 0.01 * len(self.lists["a"])

    def counts_by_name(self, x, counts=Counter):
        self.counts["a"] += 1
        return 1 + 0.01 * self.counts["a"]

    def renames_a_key(self, x, table=lambda: {1: None}):
        ((key, value),) = self.table.items()
        del self.table[key]
        self.table[key + 1] = value
        return 1 + 0.01 * key

    def moves_to_the_end(self, x, order=lambda: OrderedDict(a=1.0, b=1.1, c=0.9)):
        self.order.move_to_end(next(iter(self.order)))
        return next(iter(self.order.values()))

    def gathers_in_a_set(self, x, seen=set):
        self.seen.add(round(mean(x), 2))
        return 1 + 0.01 * len(self.seen)

    def counts_deep_inside(self, x, nested=lambda: {"a": [{"n": 0}], "b": (1, [0])}):
        self.nested["a"][0]["n"] += 1
        self.nested["b"][1][0] += 2
        return 1 + 0.01 * (self.nested["a"][0]["n"] + self.nested["b"][1][0])

    def keeps_a_dataclass(self, x, record=Record):
        self.record.step += 1
        self.record.seen.append(mean(x))
        return 1 + 0.01 * self.record.step + 0.1 * self.record.seen[0]

    def keeps_a_frozen_dataclass(self, x, record=Frozen):
        self.record.table["a"] *= 0.98
        return self.record.table["a"]

    def keeps_a_namespace(self, x, space=lambda: SimpleNamespace(n=0)):
        self.space.n += 1
        return 1 + 0.01 * self.space.n

    def averages_in_an_object(self, x, meter=Meter):
        return 1 + 0.1 * self.meter.update(mean(x))

    def counts_in_slots(self, x, held=Slotted):
        return self.held.grow()

    def changes_the_attribute_of_a_dictionary(self, x, settings=Settings):
        self.settings.extra *= 0.98
        return self.settings.extra

    def changes_what_a_partial_holds(self, x, function=lambda: partial(dict, value=[1.0])):
        self.function.keywords["value"][0] *= 0.98
        return self.function()["value"][0]

    def has_two_names_for_one_list(self, x, start=_twice):
        self.one[0] *= 0.98
        return self.other[0]

    def holds_itself(self, x, start=_ring):
        self.ring[1][0] *= 0.98
        return self.ring[0]

    def moves_a_hidden_teacher(self, x, start=_teacher):
        with torch.no_grad():
            self.teachers[0].weight.mul_(0.98)
            return 1 + 0.1 * self.teachers[0](x).mean()

    def has_hidden_statistics(self, x, norms=lambda: [nn.BatchNorm1d(WIDTH)]):
        self.norms[0](x)
        return 1 + 0.1 * float(self.norms[0].running_mean.sum()) + 0.01 * int(self.norms[0].num_batches_tracked)

    def counts_in_a_buffer(self, x, start=_integers):
        self.n += 1
        return 1 + 0.01 * int(self.n)

    def keeps_a_memory_bank(self, x, start=_bank):
        for row in x.detach()[:, :2]:
            self.bank[self.at] = row
            self.at = (self.at + 1) % len(self.bank)
        return 1 + 0.1 * float(self.bank.sum())

    def keeps_a_queue_of_columns(self, x, start=_moco):
        at = int(self.at)
        for place, row in enumerate(x.detach()[:, :2]):
            self.bank[:, (at + place) % 64] = row
        self.at[0] = (at + len(x)) % 64
        return 1 + 0.1 * float(self.bank.sum())

    def draws_from_torch(self, x, g=lambda: torch.Generator().manual_seed(3)):
        return 1 + 0.1 * float(torch.rand((), generator=self.g))

    def draws_from_numpy(self, x, g=lambda: np.random.default_rng(3)):
        return 1 + 0.1 * self.g.random()

    def draws_from_old_numpy(self, x, g=lambda: np.random.RandomState(3)):
        return 1 + 0.1 * self.g.rand()

    def draws_from_python(self, x, g=lambda: random.Random(3)):
        return 1 + 0.1 * self.g.random()

    def asks_a_mean(self, x, m=MeanMetric):
        self.m.update(x.detach().mean())
        return 1 + 0.1 * self.m.compute()

    def asks_a_collection(
        self, x, m=lambda: MetricCollection({"acc": BinaryAccuracy(), "sum": SumMetric()}, compute_groups=False)
    ):
        self.m["acc"].update((x[:, 0] > 0).long(), (x[:, 1] > 0).long())
        self.m["sum"].update(1.0)
        return 1 + 0.1 * self.m["acc"].compute() + 0.01 * self.m["sum"].compute()

    def asks_a_hidden_metric(self, x, ms=lambda: {"a": SumMetric()}):
        self.ms["a"].update(1.0)
        return 1 + 0.01 * self.ms["a"].compute()

    def ends_dropout(self, x, drop=lambda: nn.Dropout(0.5)):
        self.drop.eval()
        return 1 + 0.1 * self.drop(x).mean()

    def anneals_in_a_namespace(self, x, settings=lambda: argparse.Namespace(rate=1.0, table={"a": [1.0]})):
        self.settings.rate *= 0.98
        self.settings.table["a"][0] += 0.01
        return self.settings.rate * self.settings.table["a"][0]

    def remembers_a_shape(self, x, shape=lambda: None):
        before, self.shape = self.shape, x.shape
        return 1.0 if before is None else 1 + 0.1 * before[0]

    def keeps_a_queue(self, x, waiting=Waiting):
        self.waiting.put(mean(x))
        return 1 + 0.1 * self.waiting.queue[0]

    def averages_its_weights(self, x, start=_average):
        self.average.lerp_(self.w.detach(), 0.1)
        return 1 + 0.1 * self.average.sum()

    def asks_a_running_mean(self, x, m=lambda: RunningMean(3)):
        self.m.update(x.detach().mean())
        return 1 + 0.1 * self.m.compute()

    def asks_a_hidden_wrapper(self, x, ms=lambda: [MinMaxMetric(SumMetric())]):
        self.ms[0].update(x.detach().mean())
        return 1 + 0.1 * self.ms[0].compute()["max"]

    def steps_a_second_adam(self, x, start=_adam):
        return _steps(self, x)

    def gathers_gradients_in_short_batches(self, x, start=_hidden):
        if len(x) == 10:
            self.second.zero_grad()
        (self.hidden[0] * x.detach()).square().mean().backward()
        self.second.step()
        return 1 + 0.1 * self.hidden[0].detach()

    def steps_a_schedule(self, x, start=_schedule):
        scale = _steps(self, x)
        self.schedule.step()
        return scale

    def scales_its_gradients(self, x, start=_scaler):
        loss = (self.alpha * x.detach()).square().mean()
        self.second.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.second)
        self.scaler.update()
        return 1 + 0.01 * self.scaler.get_scale() + 0.1 * self.alpha.detach()

    def remembers_in_a_data_set(self, x, memory=Memory):
        self.memory.items.append(mean(x))
        return 1 + 0.1 * self.memory[0]


class Lost:
    """Keep what no message holds: every visit begins as the fit did."""

    def replaces_a_hidden_teacher(self, x, start=_teacher):
        self.teachers = [copy.deepcopy(self.teachers[0])]
        with torch.no_grad():
            self.teachers[0].bias.add_(0.01)
            return 1 + 0.1 * self.teachers[0](x).mean()

    def keeps_a_distribution(self, x, draw=lambda: None):
        before, self.draw = self.draw, torch.distributions.Normal(mean(x), 1.0)
        return 1.0 if before is None else 1 + 0.1 * before.mean

    def keeps_a_function(self, x, function=lambda: None):
        before, self.function = self.function, lambda: 2.0
        return 1.0 if before is None else before()

    def makes_an_optimizer(self, x):
        if not hasattr(self, "second"):
            _second(self)
        return _steps(self, x)

    def turns_a_complex_number(self, x, z=lambda: 1 + 0j):
        self.z *= 0.6 + 0.8j
        return 1 + 0.1 * self.z.real

    def changes_a_sparse_tensor(self, x, t=lambda: torch.eye(3).to_sparse()):
        self.t.mul_(0.98)
        return float(self.t.to_dense()[1, 1])

    def turns_an_enum(self, x, phase=lambda: Phase.WARM):
        before, self.phase = self.phase, Phase.HOT
        return before.value

    def replaces_a_method(self, x):
        before, self.extra_repr = "extra_repr" in vars(self), lambda: ""
        return 1.2 if before else 1.0

    def makes_a_cache(self, x, lin=lambda: nn.Linear(WIDTH, 1)):
        if not hasattr(self.lin, "cache"):
            self.lin.register_buffer("cache", torch.ones(()), persistent=False)
        self.lin.cache *= 0.98
        return self.lin.cache


class Refused:
    """Change what no visit may change, each in a fit of its own."""

    def adds_a_hook(self, x, lin=nn.Identity, changes="lin._forward_hooks"):
        self.lin.register_forward_hook(lambda module, args, output: 2 * output)
        return 1.0

    def adds_a_parameter_hook(self, x, changes="w._backward_hooks"):
        self.w.register_hook(lambda grad: 2 * grad)
        return 1.0

    def adds_a_hook_after_gradients(self, x, changes="w._post_accumulate_grad_hooks"):
        self.w.register_post_accumulate_grad_hook(lambda parameter: None)
        return 1.0

    def replaces_its_loss(self, x, lin=nn.Identity, changes="lin"):
        self.lin = nn.Tanh()
        return 1.0

    def adds_a_layer(self, x, changes="more"):
        self.more = nn.Tanh()
        return 1.0

    def removes_a_layer(self, x, lin=nn.Identity, changes="lin"):
        if hasattr(self, "lin"):
            del self.lin
        return 1.0

    def writes_into_a_data_set(self, x, samples=lambda: TensorDataset(torch.zeros(4, 2)), changes="samples"):
        self.samples.tensors[0].add_(1)
        return 1.0


class Classes:
    """Where pickles find the classes of variants."""


def variants(of):
    """A class per method of a class."""
    made = {}
    for name, scale in vars(of).items():
        if inspect.isfunction(scale):
            keywords = {key: one.default for key, one in list(inspect.signature(scale).parameters.items())[2:]}
            members = {"scale": scale, "start": keywords.pop("start", None), "changes": keywords.pop("changes", "")}
            members["start"] = members["start"] or keeps(keywords)
            members.update({"__qualname__": f"{Classes.__name__}.{name}", "__module__": __name__})
            made[name] = type(name, (Variant,), members)
            setattr(Classes, name, made[name])
    return made


def keeps(makers):
    """Starts with attributes that are made by functions."""

    def start(self):
        for name, make in makers.items():
            setattr(self, name, make())

    return start


VARIANTS = {**variants(Kept), **variants(Lost)}
REFUSED = variants(Refused)
LOST = {
    "replaces_a_hidden_teacher": "teachers (a Linear)",
    "keeps_a_distribution": "draw (a Normal)",
    "keeps_a_function": "function (a function)",
    "makes_an_optimizer": "second (a SGD)",
    "makes_a_cache": "lin.cache (make it in __init__)",
    "turns_a_complex_number": "z (a complex)",
    "changes_a_sparse_tensor": "t (a torch.sparse.FloatTensor)",
    "turns_an_enum": "phase (a Phase)",
    "replaces_a_method": "extra_repr (it hides a part of its class)",
}


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
