# SPDX-License-Identifier: Apache-2.0
"""Every method gives the same bits whether one process holds all columns or several hold a shard each.

``RULES`` of the contract suite are covered, so a new method is.
"""

from functools import cache

import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows
from cases import in_turn, pairwise
from column_shards import divided, same
from test_contract import RULES

from fl_lightning import algorithms as fl
from fl_lightning.algorithms.base import overrides
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import rule_state
from fl_lightning.core.storage.declared import server_state
from fl_lightning.core.updates import Columns, UpdateMatrix
from fl_lightning.ops.slices import slice_columns, subtrees

# Nine slices, the last one short; layers that cross borders, lie within a slice or are as short as a bias.
SIZES = (20_000, 13, 30_001, 1, 15_985)
LAYOUT = ParamLayout.from_sizes(SIZES)
SHARDS = (2, 3, 7)
DTYPES = (torch.float32, torch.float64)


@cache
def cohorts(dtype, rounds=2):
    return list(_cohorts(dtype, rounds, 4, 7))


def _cohorts(dtype, rounds, m, clients):
    generator = torch.Generator().manual_seed(3)
    for when in range(rounds):
        ids = torch.randperm(clients, generator=generator)[:m].tolist()
        losses = torch.rand(m, generator=generator, dtype=torch.float64) + 0.2
        rows, control = (random_rows(m, 10 * when + k, dtype, LAYOUT.numel) for k in range(2))
        companions = {"disparity": UpdateMatrix(0.1 * control, LAYOUT), "control": UpdateMatrix(control, LAYOUT)}
        params = torch.randn(LAYOUT.numel, generator=generator).to(dtype)

        def ask(at, losses=losses):
            return losses * (0.5 + 1e-9 * at.double().square().sum())

        yield make_cohort(
            rows, losses, ids, when, LAYOUT, losses_at=ask, companions=companions, num_clients=clients, params=params
        )


def pair(name):
    server = RULES[name]()
    return server, server.client_rule()


@pytest.mark.parametrize(
    ("name", "dtype", "shards"),  # two of eleven shards hold nothing
    dict.fromkeys(
        [*in_turn(RULES, DTYPES, (3, 3, 11, 11, 3, 3, 3, 3)), *pairwise(["FedHEAL", "FedLF-needed"], DTYPES, (3, 11))]
    ),
)
def test_shards_of_the_columns_give_the_same_bits(name, dtype, shards):
    rounds = cohorts(dtype)
    whole, found = (divided(lambda: pair(name), rounds, count) for count in (1, shards))
    assert same(found.steps, whole.steps)
    assert str(found.reports) == str(whole.reports)
    assert same(found.state, whole.state)


class PastTheDoor(fl.FedAvg):
    """Adds up columns by itself, although it says that it works on a shard of them."""

    columnwise = True

    def aggregate(self, cohort):
        lengths = cohort.updates.rows.double().square().sum(1)
        return cohort.updates.combine(lengths / lengths.sum())


def test_a_rule_that_adds_up_by_itself_is_found_out():
    rounds = cohorts(torch.float32, 1)
    whole, found = (divided(lambda: (PastTheDoor(), fl.ClientRule()), rounds, shards) for shards in (1, 3))
    assert not same(found.steps, whole.steps)


def test_a_vector_of_another_length_is_no_row():
    class KeepsLosses(fl.FedAvg):
        losses = server_state(torch.Tensor)

    rule = KeepsLosses()
    rule.losses = torch.ones(4)
    with pytest.raises(
        ValueError, match=r"^KeepsLosses must hold .* found shape \[4\]: let what has another shape begin"
    ):
        rule_state.state_dict(rule, Columns(Columns.cut(LAYOUT.numel, 3)))
    assert same(rule_state.state_dict(rule, Columns.whole(LAYOUT.numel)), {"losses": torch.ones(4)})


def test_what_a_rule_of_somebody_else_does_not_say_is_not_known():
    def aggregate(self, cohort):
        return cohort.updates.rows[0] / cohort.updates.rows[0].norm()

    def subclass(*bases, **said):
        return type("Theirs", bases, said)

    changed, normed = subclass(fl.FedAvg, aggregate=aggregate), type("Normed", (), {"aggregate": aggregate})
    shown = subclass(fl.FedLF, evaluation_params=lambda self, params: params * 2)
    committing = subclass(fl.ClientRule, commit=lambda self, cohort: None)
    mixed, again = subclass(normed, fl.FedAvg), subclass(PastTheDoor, aggregate=aggregate)
    assert not any(kind.columnwise for kind in (changed, shown, committing, mixed, again))
    training = subclass(fl.ClientRule, begin_client=lambda self, work: None)
    assert all(kind.columnwise for kind in (subclass(fl.FedAvg), training, subclass(changed, columnwise=True)))


@pytest.mark.parametrize("name", [name for name in RULES if overrides(RULES[name]().client_rule(), "commit")])
def test_client_halves_beside_another_rule_give_the_same_bits(name):
    rounds = cohorts(torch.float32)
    whole, found = (divided(lambda: (fl.FedHEAL(), pair(name)[1]), rounds, shards) for shards in (1, 3))
    assert same(found.steps, whole.steps)
    assert same(found.state, whole.state)


@pytest.mark.parametrize("total", [1, 8192, 8193, 100_000, 3_000_000, 11_173_962])
@pytest.mark.parametrize("shards", [1, 2, 3, 7, 16])
def test_shards_end_where_slices_end(total, shards):
    borders = Columns.cut(total, shards)
    assert borders[0] == 0
    assert borders[-1] == total
    assert sorted(borders) == list(borders)
    assert all(border % slice_columns(total) == 0 for border in borders[:-1])
    held = [Columns(borders, shard).numel for shard in range(shards)]
    assert sum(held) == total
    assert max(held) - min(held) <= 2 * slice_columns(total)


def test_a_matrix_must_fit_its_columns():
    columns = Columns(Columns.cut(LAYOUT.numel, 2), 1)
    with pytest.raises(ValueError, match=rf"rows must have shape \[m, {columns.numel}\]"):
        UpdateMatrix(torch.zeros(2, LAYOUT.numel), LAYOUT, columns)
    with pytest.raises(ValueError, match="columns must be those of the layout"):
        UpdateMatrix(torch.zeros(2, LAYOUT.numel), LAYOUT, Columns.whole(5))
    with pytest.raises(ValueError, match=r"norms must have shape \[2\]"):
        UpdateMatrix(torch.zeros(2, LAYOUT.numel), LAYOUT, norms=torch.zeros(3))


@pytest.mark.parametrize("shards", SHARDS)
def test_sums_of_layers_elsewhere_do_not_travel(shards):
    """A shard sends the sums of the layers that it has columns of, and says of all shards how many these are."""
    sent, width = [], slice_columns(LAYOUT.numel)
    for shard in range(shards):

        def gather(mine, sizes, shard=shard):
            sent.append((len(mine), sizes))
            assert mine.dim() == 3
            return [torch.zeros(size, *mine.shape[1:], dtype=mine.dtype) for size in sizes]

        columns = Columns(Columns.cut(LAYOUT.numel, shards), shard, gather)
        UpdateMatrix(torch.ones(4, columns.numel), LAYOUT, columns).gram()
    sizes = sent[0][1]
    assert [own for own, _ in sent] == sizes
    assert all(others == sizes for _, others in sent)
    nodes = sum(len(subtrees(*span, LAYOUT.numel)) for span in columns.spans)
    # Each border between nodes lies within one layer, which both sides send.
    assert sum(sizes) == LAYOUT.num_layers + nodes - 1 < LAYOUT.num_layers * nodes
    assert all(border % width == 0 and border not in LAYOUT.layer_starts for border in columns.borders[1:-1])
