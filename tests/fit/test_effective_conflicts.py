# SPDX-License-Identifier: Apache-2.0
"""Conflicts in the products of LoRA factors, against the products themselves."""

import pytest
import torch
from column_shares import in_shares, shared
from support import CLASSES, federated_blobs, quiet_trainer
from test_telemetry import Watch, Witness
from torch import nn

import fl_lightning as fl
from fl_lightning.core.updates import Columns
from fl_lightning.fit.effective_conflicts import EffectiveConflicts


class Peft(nn.Module):
    """Factors as PEFT names them, in a module per adapter."""

    def __init__(self, base, first, second, scaling):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": first}), nn.ModuleDict({"default": second})
        self.scaling = {"other": 100.0, "default": scaling}

    def forward(self, inputs):
        return self.base_layer(inputs) + self.scaling["default"] * self.lora_B["default"](
            self.lora_A["default"](inputs)
        )


def linear(width, out, rank=2, scaling=1.0):
    bias = {"bias": False}
    return Peft(nn.Linear(width, out), nn.Linear(width, rank, **bias), nn.Linear(rank, out, **bias), scaling)


class Loralib(nn.Module):
    """Factors as loralib names them, parameters of their layer."""

    def __init__(self, first, second, scaling):
        super().__init__()
        self.lora_A, self.lora_B = (nn.Parameter(torch.zeros(shape)) for shape in (first, second))
        self.scaling = scaling


def convolution():
    first, second = nn.Conv2d(3, 2, 3, bias=False), nn.Conv2d(2, 4, 1, bias=False)
    return Peft(nn.Conv2d(3, 4, 3), first, second, 0.5)


class Embedded(nn.Module):
    """PEFT's adapter of an embedding."""

    def __init__(self):
        super().__init__()
        self.lora_embedding_A = nn.ParameterDict({"default": torch.zeros(2, 9)})
        self.lora_embedding_B = nn.ParameterDict({"default": torch.zeros(5, 2)})
        self.scaling = {"default": 2.0}


def one_frozen(name):
    module = nn.Sequential(linear(6, 5), nn.Linear(5, 2))
    getattr(module[0], name)["default"].requires_grad_(False)
    return module


MODULES = {
    "two ranks and scalings": lambda: nn.Sequential(linear(6, 5, 2, 0.25), linear(5, 4, 3, 2.0)),
    "beside a head": lambda: nn.Sequential(linear(6, 5), nn.Linear(5, 2)),
    "loralib": lambda: nn.Sequential(Loralib((2, 7), (4, 2), 3.0), nn.Linear(4, 2)),
    "convolution": lambda: nn.Sequential(convolution(), nn.Linear(4, 2)),
    "embedding": lambda: nn.Sequential(Embedded(), nn.Linear(5, 2)),
    "A frozen": lambda: one_frozen("lora_A"),
    "B frozen": lambda: one_frozen("lora_B"),
    "the module itself": lambda: linear(6, 5),
}


def effective(module, flat, layout):
    """All weights that act, one after the other, in float64: the products, and what is no factor."""
    values = {name: p.detach().double() for name, p in module.named_parameters()}
    values |= {name: v.double() for name, v in zip(layout.names, layout.views(flat), strict=True)}
    found = []
    for name, value in values.items():
        other = values.get(name.replace("_A", "_B"))
        if "_A" in name and (name in layout.names or name.replace("_A", "_B") in layout.names):
            owner = module.get_submodule(name.partition("lora_")[0].rstrip("."))
            scaling = owner.scaling["default"] if isinstance(owner.scaling, dict) else owner.scaling
            found.append(scaling * (other.flatten(1) @ value.flatten(1)))
        elif name in layout.names and "lora_" not in name:
            found.append(value)
    return torch.cat([value.flatten() for value in found])


def drawn(module, clients=24, seed=0):
    """A cohort around random weights, and a step."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    layout = fl.ParamLayout.from_module(module)
    params = layout.flatten(layout.parameters(module))
    rows, step = torch.randn(clients, layout.numel), torch.randn(layout.numel)
    return cohort_of(params, rows, layout), step


def cohort_of(params, rows, layout):
    ids = tuple(range(len(rows)))
    return fl.Cohort(params, fl.UpdateMatrix(rows, layout), None, torch.ones(len(rows)), ids, 0)


def one_by_one(module, cohort, step):
    counts = EffectiveConflicts(module, cohort.updates.layout)
    single = [cohort_of(cohort.params, row[None], cohort.updates.layout) for row in cohort.updates.rows]
    return [counts.count(one, step)["conflicts_effective"] == 1 for one in single]


@pytest.mark.parametrize("kind", MODULES)
def test_equals_products(kind):
    module = MODULES[kind]()
    cohort, step = drawn(module)
    layout, before = cohort.updates.layout, cohort.params
    global_change = effective(module, before, layout) - effective(module, before - step, layout)
    changes = [
        effective(module, before, layout) - effective(module, before - row, layout) for row in cohort.updates.rows
    ]
    expected = [bool(change @ global_change < 0) for change in changes]
    assert one_by_one(module, cohort, step) == expected
    assert EffectiveConflicts(module, layout).count(cohort, step) == {"conflicts_effective": sum(expected)}
    assert 0 < sum(expected) < len(expected), "otherwise nothing was told apart"
    plain = [bool(row.double() @ step.double() < 0) for row in cohort.updates.rows]
    assert kind == "A frozen" or plain != expected, "otherwise counting in the factors would do"


def test_clients_can_agree_in_factors_and_conflict_in_products():
    module = linear(1, 1, rank=1)
    layout = fl.ParamLayout.from_module(module)  # a, b
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    cohort, step = cohort_of(torch.tensor([1.0, -2.0]), rows, layout), torch.tensor([0.5, 0.5])
    assert (rows @ step)[:2].gt(0).all()
    # b a is -2; the first client makes it 0, the second -3, and the step -1.25.
    assert one_by_one(module, cohort, step) == [False, True, False]


def test_small_updates_of_large_factors_keep_their_digits():
    module = linear(40, 30)
    cohort, step = drawn(module, seed=1)
    small = cohort_of(1e4 * cohort.params, 1e-4 * cohort.updates.rows, cohort.updates.layout)
    layout, change = cohort.updates.layout, []
    for row in (*small.updates.rows, 1e-4 * step):
        (a, b), (da, db) = layout.views(small.params.double()), layout.views(row.double())
        change.append((db @ (a - da) + b @ da).flatten())
    expected = [bool(each @ change[-1] < 0) for each in change[:-1]]
    assert one_by_one(module, small, 1e-4 * step) == expected


def test_factors_that_do_not_multiply_count_as_they_are():
    module = Loralib((4, 3), (6, 2), 1.0)  # of loralib's MergedLinear, a convolution in groups
    cohort, step = drawn(module)
    assert EffectiveConflicts(module, cohort.updates.layout).count(cohort, step) == {}


@pytest.mark.parametrize("kind", ["beside a head", "two ranks and scalings"])
def test_shares_of_the_columns_count_alike(kind):
    module = nn.Sequential(*(MODULES[kind]()), linear(600, 900, 8))
    cohort, step = drawn(module)
    total, counts = cohort.updates.layout.numel, EffectiveConflicts(module, cohort.updates.layout)
    assert len(set(Columns.cut(total, 3))) > 2, "otherwise there is nothing to share"
    found = in_shares(total, 3, lambda columns: counts.count(shared(cohort, columns), columns.part(step)))
    assert found == [counts.count(cohort, step)] * 3


def test_fits_log_the_count():
    torch.manual_seed(0)
    net = nn.Sequential(linear(12, 16, 2, 2.0), nn.ReLU(), linear(16, CLASSES, 2, 2.0))
    module = fl.ClientModule(net, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), num_classes=CLASSES)
    watch, witness = Watch(), Witness(fl.algorithms.FedAvg())
    strategy = fl.FederatedStrategy(witness, clients_per_round=4, local_epochs=2, seed=3)
    quiet_trainer(strategy, 6, callbacks=[watch]).fit(module, federated_blobs(alpha=0.1))
    counts = EffectiveConflicts(module, witness.seen[0][0].updates.layout)
    kept, seen = [logged["fed/conflicts_effective"] for logged in watch.metrics], watch.records
    assert kept == [record.scalars["conflicts_effective"] for record in seen]
    assert sum(kept) > 0, "otherwise nothing was counted"
    assert counts.count(*witness_of(witness, module)) == {"conflicts_effective": kept[-1]}


def witness_of(witness, module):
    """The last cohort before its step, and the step."""
    cohort, rows, step = witness.seen[-1]
    layout = cohort.updates.layout
    after = layout.flatten(layout.parameters(module))
    return cohort_of(after + step.float(), rows.float(), layout), step.float()
