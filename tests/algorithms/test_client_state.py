# SPDX-License-Identifier: Apache-2.0
"""Where a client rule's state lives: a visit needs the declared pieces, and nothing of other clients."""

import pytest
import torch
from client_rounds import CLASSES, INPUTS, Net, Rounds, client_data
from support import reload
from test_contract import RULES, assert_same_state

from fl_lightning.algorithms import FA, FedAvg, Federation, FedProc, FedProto, FedRep
from fl_lightning.algorithms.base import overrides
from fl_lightning.core.storage import rule_state

MAKERS = {
    **RULES,
    "FA": lambda: FA(torch.eye(INPUTS).double(), sigma=4.0),
    "FedProc": lambda: FedProc(9, num_classes=CLASSES),
    "FedProto": lambda: FedProto(num_classes=CLASSES),
    "FedRep": lambda: FedRep(head_epochs=0),  # a visit is one pass
}
NAMES = [name for name, make in MAKERS.items() if overrides(make().client_rule())]
COHORTS = ((0, 1, 2), (1, 2, 3), (0, 2, 3), (0, 1, 2))


def whole(name, clients=4):
    return Rounds(FedAvg(), MAKERS[name]().client_rule(), client_data(clients, batches=2), Net(), momentum=0.5)


def at_the_client(run, name, client_id, stays):
    """The rule of a client that has just been told what its server sends, and has kept what counted."""
    rule = MAKERS[name]().client_rule()
    rule.check_module(run.module, run.layout)
    rule_state.load_broadcast(rule, reload(rule_state.broadcast(run.client)))
    rule_state.load_client_state(rule, client_id, reload(rule_state.client_state(run.client, client_id)))
    if client_id in stays:
        rule_state.set_local_state(rule, client_id, *reload(stays[client_id]))
    rule.begin_fit(Federation(len(run.data), run.layout, torch.device("cpu"), torch.float64, 3))
    return rule


def visited(run, client_id, rule):
    """What a client sends and keeps when it trains under another rule object."""
    run.client, own = rule, run.client
    try:
        update, report, _, _ = run.train(client_id)
        return {"update": update, **{name: dict(part) for name, part in vars(report).items()}}
    finally:
        run.client = own


@pytest.mark.parametrize("name", NAMES)
def test_a_visit_needs_the_declared_pieces_alone(name):
    run, stays = whole(name), {}
    for when, cohort in enumerate(COHORTS):
        lost = (2,) if when == 1 else ()
        for client in cohort:
            inside = visited(run, client, run.client)
            assert_same_state(visited(run, client, at_the_client(run, name, client, stays)), inside)
            if client not in lost and inside["local_state"]:
                stays[client] = inside["local_state"], when
        run.round(cohort, lost)


STATEFUL = [name for name in NAMES if rule_state.declared(MAKERS[name]().client_rule())]
STATEFUL.remove("FedRep")  # in one pass its head stays what it was


@pytest.mark.parametrize("name", STATEFUL)
def test_without_its_pieces_a_visit_differs(name):
    """Guards the test above: it would pass on rules without state."""
    run = whole(name)
    run.round((0, 1, 2))
    inside, without = visited(run, 1, run.client), visited(run, 1, MAKERS[name]().client_rule())
    assert not all(torch.equal(one, two) for one, two in zip(tensors(inside), tensors(without), strict=True))


def tensors(state):
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [tensor for value in values for tensor in tensors(value)]


def numbers(state):
    return sum(tensor.numel() for tensor in tensors(state))


@pytest.mark.parametrize("name", NAMES)
def test_a_client_is_sent_nothing_about_others(name):
    few, many = whole(name, 6), whole(name, 6)
    few.round((0, 1))
    many.round((0, 1, 2, 3, 4))
    for client in (0, 1):
        assert (
            numbers(rule_state.client_state(many.client, client))
            == numbers(rule_state.client_state(few.client, client))
            <= few.layout.numel
        )
    assert numbers(rule_state.client_state(few.client, 5)) == 0
    assert numbers(rule_state.broadcast(many.client)) == numbers(rule_state.broadcast(few.client))
