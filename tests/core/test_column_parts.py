# SPDX-License-Identifier: Apache-2.0
"""What processes hold in columns comes back from a checkpoint, for any number of processes."""

import pytest
import torch
from column_shards import in_shards
from torch import Tensor

from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import rule_state
from fl_lightning.core.storage.declared import server_state
from fl_lightning.core.storage.per_client import per_client
from fl_lightning.core.storage.row_history import row_history
from fl_lightning.core.storage.rule_state import ColumnShard, full_state_dict, has_shards, without_shards
from fl_lightning.core.updates import Columns, UpdateMatrix

TOTAL = 50_000
LAYOUT = ParamLayout.from_sizes([TOTAL])
LAST = TOTAL % 8192  # what the last process has, if there are two or nine


class Method:
    """Rows of every kind, and vectors that may happen to be as long."""

    momentum, pair, nothing, absent = (server_state(Tensor) for _ in range(4))
    gradient = server_state(torch.zeros(0))  # a number per client
    counts, weights = per_client(Tensor), per_client(float)
    history = row_history(capacity="most", reserve="most", device="place")
    empty = row_history(capacity="most", reserve="most", device="place")
    round = server_state(0)
    most, place = 5, None


def filled(columns, clients):
    """A rule in a process with some columns."""
    rule, generator = Method(), torch.Generator().manual_seed(0)
    rows = columns.part(torch.randn(5, TOTAL, generator=generator))
    rule.momentum, rule.pair, rule.nothing = rows[0].double(), rows[1:3].clone(), columns.part(torch.zeros(0, TOTAL))
    rule.counts[4], rule.counts[7] = columns.part(torch.arange(TOTAL)).to(torch.uint8), rows[3].clone()
    rule.weights[4], rule.round, rule.gradient = 0.5, 5, torch.arange(float(clients))
    rule.history.remember(UpdateMatrix(rows, LAYOUT, columns), {0: 5, 1: 6, 4: 2}, 3)
    return rule


def same(one, two):
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[name], two[name]) for name in one)
    return torch.equal(one, two) and one.dtype == two.dtype if isinstance(one, Tensor) else one == two


@pytest.mark.parametrize("clients", [3, LAST, TOTAL])
@pytest.mark.parametrize("before", [1, 2, 9])
@pytest.mark.parametrize("after", [1, 3, 9])  # of seven slices, so that some of nine hold nothing
def test_any_number_of_processes_reads_what_any_number_has_written(tmp_path, before, after, clients):
    def written(columns):
        rule = filled(columns, clients)
        found = rule_state.state_dict(rule, columns)
        assert has_shards(found) == (before > 1)
        again = Method()
        rule_state.load_state_dict(again, found, columns, {})
        assert same(rule_state.state_dict(again), rule_state.state_dict(rule)), "a fit goes on from its own columns"
        return full_state_dict(found)

    def read(columns):
        rule = Method()
        rule_state.load_state_dict(rule, whole, columns, {})
        assert same(rule_state.state_dict(rule), rule_state.state_dict(filled(columns, clients)))

    first, *others = in_shards(TOTAL, before, written)
    torch.save(first, tmp_path / "a.ckpt")
    whole = torch.load(tmp_path / "a.ckpt", weights_only=True)
    expected = rule_state.state_dict(filled(Columns.whole(TOTAL), clients))
    expected["empty"]["rows"] = whole["empty"]["rows"]  # none, of any length
    assert same(whole, expected)
    assert all(other["momentum"].numel() == other["history"]["rows"].numel() == 0 for other in others)
    in_shards(TOTAL, after, read)


def test_what_all_processes_have_alike_is_everything_else():
    columns = Columns(Columns.cut(TOTAL, 2), 1, lambda mine, sizes: [mine, mine])
    found = without_shards(rule_state.state_dict(filled(columns, 3), columns))
    assert found["momentum"] is found["history"]["rows"] is found["counts"][4] is None
    assert same({name: found[name] for name in ("weights", "round")}, {"weights": {4: 0.5}, "round": 5})
    assert isinstance(rule_state.state_dict(filled(columns, 3), columns)["pair"], ColumnShard)


def test_clients_have_other_numbers_in_what_is_restored():
    columns, rule = Columns.whole(TOTAL), Method()
    rule_state.load_state_dict(rule, rule_state.state_dict(filled(columns, 3), columns), columns, {4: 7, 7: 4, 5: 1})
    assert (sorted(rule.counts), rule.counts[7].dtype, 1 in rule.history) == ([4, 7], torch.uint8, True)
