# SPDX-License-Identifier: Apache-2.0
"""Methods as texts: names with literal arguments, and what is said about all others."""

import pytest

from fl_lightning import algorithms
from fl_lightning.comparison.command import method_names, rule_from


def test_names_and_calls_make_rules():
    assert type(rule_from("FedLF")) is algorithms.FedLF
    assert rule_from("QFedAvg(q=2)").q == 2
    assert rule_from(" QFedAvg( 0.5 ) ").q == 0.5
    assert rule_from("FedLF(layers='tensor')").layers == "tensor"
    assert type(rule_from("fl_lightning.algorithms.fedlf.FedLF()")) is algorithms.FedLF
    bases = rule_from("FA([[1.0, 0.0]], sigma=2.0)")
    assert (type(bases), bases.sigma) == (algorithms.FA, 2.0)


def test_every_exported_method_can_be_named():
    exported = {n for n in algorithms.__all__ if isinstance(getattr(algorithms, n), type)}
    rules = {n for n in exported if issubclass(getattr(algorithms, n), algorithms.ServerRule)} - {"ServerRule"}
    assert set(method_names()) == rules


@pytest.mark.parametrize(("text", "near"), [("FedLf", "FedLF"), ("QfedAvg(q=2)", "QFedAvg"), ("Scaffold", "SCAFFOLD")])
def test_a_misspelt_name_lists_the_names_and_the_nearest(text, near):
    with pytest.raises(ValueError, match=f"did you mean '{near}'[?] there are AAggFF, AdaFed, AFL, Ditto, .*TERM"):
        rule_from(text)


@pytest.mark.parametrize(
    "text",
    ["", "FedLF(", "FedLF() + 1", "__import__('os').system('true')", "QFedAvg(q=__import__('os'))", "QFedAvg(**{})",
     "(lambda: 1)()", "FedLF; FedAvg", "QFedAvg(*[2])"],
)  # fmt: skip
def test_anything_but_a_name_with_literals_is_refused(text):
    with pytest.raises(ValueError, match="a method must be a name such as FedLF, with arguments such as QFedAvg"):
        rule_from(text)


def test_wrong_arguments_and_classes_are_named():
    with pytest.raises(TypeError, match=r"QFedAvg takes q, .*found 'QFedAvg\(p=2\)': got an unexpected .* 'p'"):
        rule_from("QFedAvg(p=2)")
    with pytest.raises(ValueError, match=r"q of QFedAvg must be .*, found -1"):
        rule_from("QFedAvg(q=-1)")
    with pytest.raises(ValueError, match=r"the method no_such_module.Rule cannot be imported"):
        rule_from("no_such_module.Rule")
    with pytest.raises(ValueError, match=r"the method torch.nn.Linear must be a subclass of .*ServerRule"):
        rule_from("torch.nn.Linear(2, 2)")
