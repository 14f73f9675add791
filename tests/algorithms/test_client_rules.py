# SPDX-License-Identifier: Apache-2.0
"""What a client rule says about itself: what it overrides, and whether worker processes may train its clients."""

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


@pytest.mark.parametrize("rule", [Counting(), Asking(), *(r().client_rule() for r in (FCFL, SCAFFOLD, Ditto, FedProx))])
def test_a_rule_overrides_what_its_classes_define(rule):
    defined = {name for kind in type(rule).__mro__ for name in vars(kind) if kind not in (ClientRule, object)}
    assert rule.overrides()
    for name in (name for name in vars(ClientRule) if not name.startswith("_") and name != "reads"):
        assert rule.overrides(name) == (name in defined), name
    assert rule.overrides("begin_batch", *defined & vars(ClientRule).keys())


def test_some_of_several_hooks_are_enough():
    term = ProximalTerm(0.1)
    assert term.overrides("loss_weight", "loss_term")
    assert not term.overrides("loss_weight", "commit")


def test_a_commit_needs_a_take_aside_as_new_as_itself():
    class Telling(Counting):
        def take_aside(self, client_id):
            return {}

    class Newer(Telling):
        def commit(self, cohort):
            pass

    class Both(Newer):
        def commit(self, cohort):
            pass

        def take_aside(self, client_id):
            return {}

    found = [kind().trains_in_workers for kind in (ClientRule, Asking, Counting, Telling, Newer, Both)]
    assert found == [True, True, False, True, False, True]
    assert ClientRule().take_aside(0) == {}
    assert Counting().take_aside(0) is None


def test_the_methods_of_the_library_train_in_workers():
    rules = [rule for rule in vars(algorithms).values() if isinstance(rule, type) and hasattr(rule, "client_rule")]
    made = [rule([[0.0]]) if rule is algorithms.FA else rule() for rule in rules if rule is not algorithms.ServerRule]
    assert len(made) == 24
    assert all(rule.client_rule().trains_in_workers for rule in made)
