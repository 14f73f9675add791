# SPDX-License-Identifier: Apache-2.0
"""What follows from the declarations of a class."""

import pytest
import torch
from support import reload
from torch import Tensor

from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.model_snapshot import Snapshot
from fl_lightning.core.storage import rule_state
from fl_lightning.core.storage.at_clients import at_clients
from fl_lightning.core.storage.declared import Extent, server_state
from fl_lightning.core.storage.per_client import per_client
from fl_lightning.core.storage.row_history import RowHistory, row_history
from fl_lightning.core.updates import UpdateMatrix


class Base:
    """One of each kind at the server."""

    rounds = server_state(3)
    c = server_state(Tensor, sent="all")
    mean = server_state(Tensor, wide=True)
    c_i = per_client(Tensor, sent="owner", device="control_device")
    weights = per_client(float)

    def __init__(self, control_device=None):
        self.control_device = control_device


class Method(Base):
    """And what clients keep."""

    own = at_clients(files="directory")
    last = at_clients(size="part")
    history = row_history(capacity="max_history", reserve="reserved_rows", device="history_device")
    max_history, reserved_rows, history_device = 2, 5, None
    part = 0

    def __init__(self, directory=None):
        super().__init__()
        self.directory = directory


def snapshot(value):
    return Snapshot(torch.full((3,), float(value)), torch.tensor([value], dtype=torch.uint8))


def rows(seed):
    torch.manual_seed(seed)
    return UpdateMatrix(torch.randn(2, 4, dtype=torch.float64), ParamLayout.from_sizes([4]))


def filled(rule):
    rule.rounds, rule.c = 8, torch.ones(4)
    rule.c_i[5], rule.weights[5], rule.weights[2] = torch.full((4,), 2.0), 0.5, 0.25
    if isinstance(rule, Method):
        rule_state.set_local_state(rule, 5, {"own": vars(snapshot(1)), "last": vars(snapshot(2))}, when=3)
        rule.history.remember(rows(0), {0: 5, 1: 6}, 3)
    return rule


def plainly(state):
    if isinstance(state, dict):
        return {name: plainly(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, Tensor) else state


def test_values_begin_anew_in_every_object():
    one, two = Method(), Method()
    assert (one.rounds, one.c, dict(one.weights), len(one.history)) == (3, None, {}, 0)
    filled(one)
    assert (two.rounds, two.c, dict(two.weights), len(two.history)) == (3, None, {}, 0)
    assert list(rule_state.declared(one)) == ["rounds", "c", "mean", "c_i", "weights", "own", "last", "history"]
    assert Method.c.name == "c"
    with pytest.raises(AttributeError, match="weights cannot be replaced: change what it holds"):
        one.weights = {}


def test_a_class_can_do_without_what_its_base_class_keeps():
    class Less(Base):
        rounds = 7

    assert "rounds" not in rule_state.declared(Less())
    assert "rounds" not in rule_state.state_dict(Less())


@pytest.mark.parametrize("in_files", [False, True])
def test_a_checkpoint_holds_all_of_it_and_a_reset_forgets_all(in_files, tmp_path):
    directory = str(tmp_path) if in_files else None
    rule = filled(Method(directory))
    state = rule_state.state_dict(rule)
    assert "mean" not in state, "there is none"
    assert plainly(state["weights"]) == {5: 0.5, 2: 0.25}
    other = Method(directory)
    other.mean = torch.ones(4)
    rule_state.load_state_dict(other, reload(state))
    assert plainly(rule_state.state_dict(other)) == plainly(state)
    assert other.mean is None, "what a state lacks begins anew"
    assert other.own[5].params.tolist() == [1.0] * 3
    state["c"].zero_()
    state["c_i"][5].zero_()
    assert other.c.tolist() == [1.0] * 4, "loaded tensors are copies"
    assert other.c_i[5].tolist() == [2.0] * 4
    rule_state.reset(rule)
    assert plainly(rule_state.state_dict(rule)) == plainly(rule_state.state_dict(Method(directory)))
    with pytest.raises(ValueError, match=r"Method declares \['rounds', .*\] here, found \['momentum'\]"):
        rule_state.load_state_dict(other, {"momentum": 1})
    assert other.rounds == 8, "a state that is refused leaves the rule as it was"
    elsewhere = Method(None if in_files else str(tmp_path))
    with pytest.raises(ValueError, match=r"the checkpoint has the personal models .*directory"):
        rule_state.load_state_dict(elsewhere, state)
    assert elsewhere.rounds == 3, "a state that is refused leaves the rule as it was"


@pytest.mark.parametrize("in_files", [False, True])
def test_a_copy_of_another_time_leaves_the_rule_as_it_is(in_files, tmp_path):
    rule = filled(Method(str(tmp_path) if in_files else None))
    state = reload(rule_state.state_dict(rule))
    rule_state.set_local_state(rule, 5, {"own": vars(snapshot(7))}, when=4)
    rule.rounds = 9
    before = rule_state.copy_with(rule, state)
    assert (before.rounds, before.own[5].params[0], before.own.get(4)) == (8, 1.0, None)
    assert (rule.rounds, rule.own[5].params[0]) == (9, 7.0)


@pytest.mark.parametrize("happened", [False, True])
def test_a_round_that_does_not_count_is_taken_back(happened):
    one, two = filled(Method()), filled(Base())
    before = plainly([rule_state.state_dict(one), rule_state.state_dict(two)][0]), plainly(rule_state.state_dict(two))
    commit_or_undo = rule_state.transaction(one, two)
    for rule in (one, two):
        rule.rounds, rule.c, rule.mean = 1, rule.c + 1, torch.zeros(4)
        rule.c_i[5], rule.c_i[9] = rule.c_i[5] + 1, torch.zeros(4)
        rule.weights.update({5: 1.0})
    one.history.forget(before=4)
    one.history.remember(rows(1), {0: 8}, 4)
    assert one.history.select() == [5, 6], "rows wait for the round's end"
    commit_or_undo(happened)
    assert ((plainly(rule_state.state_dict(one)), plainly(rule_state.state_dict(two))) == before) != happened
    assert one.history.select() == ([8] if happened else [5, 6])
    one.history.remember(rows(2), {0: 3}, 5)
    assert 3 in one.history, "and for no longer"


def test_what_goes_to_clients_and_what_they_keep():
    server, client = filled(Method()), filled(Method())
    assert rule_state.broadcast(server).keys() == {"c"}
    assert plainly(rule_state.client_state(server, 5)) == {"c_i": [2.0] * 4}
    assert rule_state.client_state(server, 4) == {}
    rule_state.load_broadcast(client, rule_state.broadcast(server))
    assert (client.rounds, dict(client.c_i), client.c.tolist()) == (3, {}, [1.0] * 4)
    rule_state.load_client_state(client, 5, sent := rule_state.client_state(server, 5))
    sent["c_i"].zero_()
    assert client.c_i[5].tolist() == [2.0] * 4, "what was sent is copied"
    for take, names in (
        (lambda: rule_state.load_broadcast(client, {"rounds": 1}), "'c'"),
        (lambda: rule_state.load_client_state(client, 5, {"c": torch.ones(4)}), "'c_i'"),
        (lambda: rule_state.set_local_state(client, 5, {"c_i": torch.ones(4)}, 0), "'own', 'last'"),
    ):
        with pytest.raises(ValueError, match=rf"Method declares \[{names}\] here, found"):
            take()
    with pytest.raises(TypeError, match="a tensor is needed, found str"):
        rule_state.load_broadcast(client, {"c": "one"})
    assert rule_state.has_local_state(client)
    assert not rule_state.has_local_state(Base())


def test_columns_places_and_bytes(tmp_path):
    rule = Method()
    assert rule_state.in_columns(rule) == ["c", "mean", "c_i", "history"]
    assert rule_state.placement(Base()) == {"control_device"}
    assert rule_state.placement(rule, Base()) == {"control_device", "directory", "history_device"}
    extent = Extent(clients=10, cohort=3, columns=4, layers=2, model=100, dtype=torch.bfloat16)
    sizes = {"c": 8, "mean": 16, "c_i": 80, "own": 1300, "last": 1300, "history": 5 * 4 * 2 + 2 * 25 * 8}
    assert rule_state.max_nbytes(rule, extent) == {f"Method.{name}": size for name, size in sizes.items()}
    in_files = Method(str(tmp_path))
    in_files.part, in_files.reserved_rows = 7, 0
    sizes = rule_state.max_nbytes(in_files, extent)
    assert (sizes["Method.own"], sizes["Method.last"]) == (300, 13 * 7)
    assert "Method.history" not in sizes


def test_devices_are_the_rules_own():
    rule = Base("meta")
    rule.c_i[0] = torch.ones(3)
    assert rule.c_i[0].is_meta


def test_bounded_files_and_rows(tmp_path):
    bounded = Method(str(tmp_path))
    for when in (1, 2, 3):
        rule_state.set_local_state(bounded, 3, {"own": vars(snapshot(when)), "last": vars(snapshot(when))}, when)
        rule_state.state_dict(bounded)
    assert [path.stem for path in sorted(tmp_path.rglob("*.pt"))] == ["round-000002", "round-000003"]
    assert isinstance(bounded.history, RowHistory)
    assert bounded.history.capacity == 2


STARTS = {
    "a text": "x", "another type": str, "NaN": float("nan"), "an endless integer": 2**63, "None": None,
    "a tuple with a text": (1, "x"), "sparse": torch.eye(2).to_sparse(), "meta": torch.zeros(1, device="meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", STARTS)
def test_what_cannot_be_kept_is_refused(name):
    with pytest.raises(TypeError, match="start of server_state must be a number, a tensor, a tuple of these, or such"):
        server_state(STARTS[name])


def test_what_can_be_kept_is_taken():
    for start in (int, float, bool, Tensor, tuple, 0, -1.5, True, 2**63 - 1, (1, 2.0), torch.zeros(2)):
        server_state(start)
    for kind in (str, None, 1):
        with pytest.raises(TypeError, match="kind of per_client must be int, float, bool or Tensor, found"):
            per_client(kind)


def test_a_type_begins_with_nothing_and_histories_lie_where_the_rule_says():
    class Typed:
        count, kind = server_state(int), server_state(Tensor)
        wide = per_client(Tensor, dtype=torch.float64)
        history = row_history(capacity="most", reserve="most", device="place")
        most, place = 2, "meta"

    rule = Typed()
    assert (rule.count, rule.kind) == (None, None)
    rule.history.remember(rows(0), {0: 5, 1: 6}, 3)
    assert rule.history._rows.is_meta
    assert rule_state.declared(rule)["count"].max_nbytes(rule, Extent(10, 3, 4, 2, 100, torch.float32)) == 0
    sizes = rule_state.max_nbytes(rule, Extent(10, 3, 4, 2, 100, torch.float32))
    assert (sizes.keys(), sizes["Typed.wide"]) == ({"Typed.kind", "Typed.wide", "Typed.history"}, 10 * 4 * 8)
