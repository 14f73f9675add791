# SPDX-License-Identifier: Apache-2.0
"""What a client rule says about itself: what it overrides, and whether its clients may train elsewhere."""

import pytest

from fl_lightning import algorithms
from fl_lightning.algorithms import FCFL, SCAFFOLD, ClientRule, Ditto, FedAvg, FedProx, Needs
from fl_lightning.algorithms.fedprox import ProximalTerm


class Counting(ClientRule):
    def commit(self, cohort):
        pass


class Asking(ClientRule):
    needs = Needs(features=True)


def test_plain_local_training_overrides_nothing():
    assert not ClientRule().overrides()
    assert not FedAvg().client_rule().overrides()
    assert type("Other", (ClientRule,), {"__init__": lambda self: None, "helper": 1})().overrides() is False


STATED = ("reads", "column_state")  # what a class says of itself, which may be what its base class says


@pytest.mark.parametrize("rule", [Counting(), Asking(), *(r().client_rule() for r in (FCFL, SCAFFOLD, Ditto, FedProx))])
def test_a_rule_overrides_what_its_classes_define(rule):
    defined = {name for kind in type(rule).__mro__ for name in vars(kind) if kind not in (ClientRule, object)}
    assert rule.overrides()
    for name in (name for name in vars(ClientRule) if not name.startswith("_") and name not in STATED):
        assert rule.overrides(name) == (name in defined), name
    assert rule.overrides("begin_batch", *defined & vars(ClientRule).keys())


def test_some_of_several_hooks_are_enough():
    term = ProximalTerm(0.1)
    assert term.overrides("loss_weight", "loss_term")
    assert not term.overrides("loss_weight", "commit")


def test_a_rule_with_state_says_where_it_lives_as_often_as_it_adds_some():
    class Telling(Counting):
        def broadcast(self):
            return {}

    class Newer(Telling):
        def commit(self, cohort):
            pass

    class Both(Newer):
        def commit(self, cohort):
            pass

        def keep(self, client_id, kept, when):
            pass

    class Remembering(ClientRule):
        def state_dict(self):
            return {"seen": 1}

    kinds = (ClientRule, Asking, Counting, Telling, Newer, Both, Remembering)
    assert [kind().obstacle() is None for kind in kinds] == [True, True, False, True, False, True, False]
    assert Counting().obstacle() == (
        "Counting has a commit and does not say where its state lives: define broadcast, state_for or keep"
    )


def test_the_methods_of_the_library_say_where_their_state_lives():
    rules = [rule for rule in vars(algorithms).values() if isinstance(rule, type) and hasattr(rule, "client_rule")]
    made = [rule([[0.0]]) if rule is algorithms.FA else rule() for rule in rules if rule is not algorithms.ServerRule]
    assert len(made) == 33
    assert [rule.client_rule().obstacle() for rule in made] == [None] * 33
