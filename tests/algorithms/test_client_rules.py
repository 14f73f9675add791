# SPDX-License-Identifier: Apache-2.0
"""What a client rule says about itself: what it overrides, and whether its clients may train elsewhere."""

import pytest

from fl_lightning import algorithms
from fl_lightning.algorithms import FCFL, SCAFFOLD, ClientRule, Ditto, FedAvg, FedProx, Needs
from fl_lightning.algorithms.base import obstacle, overrides
from fl_lightning.core.storage.declared import server_state
from fl_lightning.core.storage.per_client import per_client


class Counting(ClientRule):
    def commit(self, cohort):
        pass


class Asking(ClientRule):
    needs = Needs(features=True)


def test_plain_local_training_overrides_nothing():
    assert not overrides(ClientRule())
    assert not overrides(FedAvg().client_rule())
    assert FedAvg().client_rule().personal_model(0) is None
    assert overrides(type("Other", (ClientRule,), {"__init__": lambda self: None, "helper": 1})()) is False


STATED = ("reads", "columnwise")  # what a class says of itself, which may be what its base class says


@pytest.mark.parametrize("rule", [Counting(), Asking(), *(r().client_rule() for r in (FCFL, SCAFFOLD, Ditto, FedProx))])
def test_a_rule_overrides_what_its_classes_define(rule):
    defined = {name for kind in type(rule).__mro__ for name in vars(kind) if kind not in (ClientRule, object)}
    assert overrides(rule)
    for name in (name for name in vars(ClientRule) if not name.startswith("_") and name not in STATED):
        assert overrides(rule, name) == (name in defined), name
    assert overrides(rule, "begin_batch", *defined & vars(ClientRule).keys())


def test_a_rule_that_commits_declares_what_it_keeps_as_often_as_it_adds_some():
    class Telling(Counting):
        rounds = server_state(0)

    class Newer(Telling):
        def commit(self, cohort):
            pass

    class Both(Newer):
        seen = per_client(int)

        def commit(self, cohort):
            pass

    kinds = (ClientRule, Asking, Counting, Telling, Newer, Both)
    assert [obstacle(kind()) is None for kind in kinds] == [True, True, False, True, False, True]
    assert obstacle(Counting()) == (
        "Counting has a commit and declares nothing that it keeps: say it with server_state or per_client"
    )


def test_the_methods_of_the_library_say_where_their_state_lives():
    rules = [rule for rule in vars(algorithms).values() if isinstance(rule, type) and hasattr(rule, "client_rule")]
    made = [rule([[0.0]]) if rule is algorithms.FA else rule() for rule in rules if rule is not algorithms.ServerRule]
    assert len(made) > 30
    assert {obstacle(rule.client_rule()) for rule in made} == {None}
