# SPDX-License-Identifier: Apache-2.0
"""What people read who write arguments into YAML files or command lines."""

import pytest

import fl_lightning as fl

jsonargparse = pytest.importorskip("jsonargparse")


def made(**options):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(fl.FederatedStrategy, "strategy")
    values = [f"--strategy.{name.replace('__', '.')}={value}" for name, value in options.items()]
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the older name
    return instantiate(parser.parse_args(values)).strategy


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"buffers": "Mean"}, "buffers.*'mean', 'global', 'largest'.*Mean"),
        ({"local_epochs": 0}, "local_epochs of FederatedStrategy must be a positive integer, found 0"),
        (
            {"algorithm": "fl_lightning.algorithms.FedLF", "algorithm__reading": "Paper"},
            "reading.*'library', 'paper', 'code'.*Paper",
        ),
        (
            {"algorithm": "fl_lightning.algorithms.FedLF", "algorithm__max_history": -1},
            "max_history of FedLF must be None or a positive integer, found -1",
        ),
        (
            {"partition": "fl_lightning.data.Dirichlet", "partition__num_clients": 3, "partition__alpha": -1},
            "alpha of Dirichlet must be a positive, finite number, found -1",
        ),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_argument_rule_and_value_are_named(options, words):
    with pytest.raises((jsonargparse.ArgumentError, ValueError), match=f"(?s){words}"):
        made(**options)


def test_lists_of_files_become_what_constructors_take():
    strategy = made(attack="fl_lightning.attacks.ZeroUpdates", attack__clients=[1, 2], clients_per_round=0.5)
    assert list(strategy._options.attack.clients) == [1, 2]
    assert strategy._options.clients_per_round == 0.5
