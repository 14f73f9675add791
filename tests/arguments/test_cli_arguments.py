# SPDX-License-Identifier: Apache-2.0
"""What people read who write arguments into YAML files or command lines."""

import sys
from pathlib import Path

import pytest

import fl_lightning as fl
from fl_lightning.__main__ import main

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
        (
            {"local_epochs": 0},
            r"local_epochs of FederatedStrategy must be a positive integer \(for less than a pass: local_steps or "
            r"limit_train_batches\), found 0",
        ),
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
    assert list(strategy.options.attack.clients) == [1, 2]
    assert strategy.options.clients_per_round == 0.5


PROJECT = """
trainer: {max_epochs: 1, logger: false, strategy: {class_path: fl_lightning.FederatedStrategy, STRATEGY}}
model:
  class_path: fl_lightning.ClientModule
  init_args: {net: {class_path: torch.nn.Linear, init_args: {in_features: 2, out_features: 2}}}
data:
  class_path: fl_lightning.FederatedDataModule
  init_args:
    data: {class_path: support.Blobs}
    partition: {class_path: fl_lightning.data.IID, init_args: {num_clients: 2}}
"""


@pytest.mark.parametrize("command", [["fit"], ["compare", "--methods", "FedAvg"]], ids=lambda command: command[0])
def test_an_unknown_option_of_a_file_is_named(command, tmp_path, monkeypatch, capsys):
    file = tmp_path / "project.yaml"
    file.write_text(PROJECT.replace("STRATEGY", "init_args: {client_per_round: 2}"))
    arguments = [*command, "--config", str(file)]
    monkeypatch.setattr(sys, "argv", ["fl_lightning", *arguments])
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "'client_per_round'" in capsys.readouterr().err.rpartition("error: ")[2]


def test_an_unknown_argument_is_named_with_the_nearest():
    with pytest.raises(TypeError, match=r"^FederatedStrategy has no argument 'client_per_round': did you mean 'c"):
        fl.FederatedStrategy(client_per_round=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 9}, r"has no argument 'rounds': Trainer\(max_epochs=...\) is the number of rounds"),
        ({"lr": 0.1}, "has no argument 'lr': configure_optimizers of the module"),
        ({"clients_per_round": 10.0}, r"a count of clients \(an int such as 10\) or a fraction of them .* found 10.0"),
        ({"clients_per_round": "all"}, r"a count of clients .* or a fraction of them .* found 'all'"),
        ({"local_epochs": 0.5}, "for less than a pass: local_steps or limit_train_batches.*found 0.5"),
    ],
)
def test_what_people_look_for_is_said_with_the_refusal(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        fl.FederatedStrategy(**options)


def test_the_page_shows_every_partition_as_files_have_it():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--partition", type=fl.data.Partition)
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    shown = [line.strip() for line in page.splitlines() if line.strip().startswith("partition: {class_path")]
    made = [type(instantiate(parser.parse_string(line)).partition) for line in shown]
    assert len(made) == len(set(made))
    public = [getattr(fl.data, name) for name in fl.data.__all__]
    assert set(made) == {kind for kind in public if isinstance(kind, type) and issubclass(kind, fl.data.Partition)} - {
        fl.data.Partition
    }
