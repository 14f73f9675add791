# SPDX-License-Identifier: Apache-2.0
"""``python -m fl_lightning compare`` with a YAML file as people write it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import watched
from copies import Copied
from test_compare import assert_same_results

from fl_lightning.__main__ import main
from fl_lightning.comparison.command import _parser
from fl_lightning.comparison.plan import Run
from fl_lightning.comparison.project import YamlProject

pytest.importorskip("jsonargparse")

CONFIG = """
trainer:
  max_epochs: 3
  accelerator: cpu
  logger: false
  strategy:
    class_path: fl_lightning.FederatedStrategy
    init_args: {clients_per_round: 2}
model:
  class_path: watched.Watched
data:
  class_path: fl_lightning.FederatedDataModule
  init_args:
    data: {class_path: support.Blobs, init_args: {train: 60}}
    partition: {class_path: fl_lightning.data.IID, init_args: {num_clients: 3}}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project.yaml").write_text(CONFIG, encoding="utf-8")
    monkeypatch.setenv(watched.DIARY, str(tmp_path))
    return tmp_path


def command(*options, methods=("FedAvg", "FedLF")):
    return ["compare", "--config", "project.yaml", "--methods", *methods, "--save-seconds", "0", *options]


def test_a_comparison_from_a_file(project, capsys):
    options = command("--lr", "0.02", "--seeds", "4", "7", "--bounds", "pooled", methods=["FedLF"])
    assert main(options) == 0
    printed = capsys.readouterr()
    assert "2 methods x 1 learning rate x 2 seeds = 4 runs, of which 0 are finished" in printed.err
    assert "[1/4] FedLF, lr 0.02, seed 4: test_acc mean 0." in printed.err
    lines = printed.out.splitlines()
    assert [line.split()[1] for line in lines[:4]] == ["method", "------", "FedLF", "pooled"]
    assert "In comparison: table.md, runs.csv" in lines[-1]
    assert len(watched.rounds(project)) == 4 * 3
    assert {f"FedLFx3 0.02 {seed} 2" for seed in (4, 7)} <= set(watched.rounds(project))
    # What is on the command line goes over what is in the file, and another configuration is refused.
    options = command("--trainer.max_epochs", "2", methods=["FedLF"])
    assert main(options) == 2
    assert "trainer.max_epochs of the project was 3 and is 2" in capsys.readouterr().err
    assert main([*options, "--folder", "other", "--seeds", "1", "--bounds", "none"]) == 0
    assert "| FedLF " in capsys.readouterr().out


def test_without_rates_the_one_of_the_file_is_used(project):
    options = ["--config", "project.yaml"]
    assert YamlProject(options).learning_rate() == 0.1
    assert YamlProject([*options, "--model.init_args.lr=0.3"]).learning_rate() == 0.3


def rate_of(module):
    optimizers = module.configure_optimizers()
    return (optimizers[0][0] if isinstance(optimizers, tuple) else optimizers).param_groups[0]["lr"]


CLIENT_MODULE = """
  class_path: fl_lightning.ClientModule
  init_args:
    net: {class_path: torch.nn.Linear, init_args: {in_features: 12, out_features: 4}}
"""


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. will be overridden")
@pytest.mark.parametrize(
    ("model", "rest"),
    [
        ("\n  class_path: support.Classifier\n", ""),
        (f"{CLIENT_MODULE}    optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.2}}}}\n", ""),
        ("\n  class_path: support.Classifier\n", "optimizer: {class_path: torch.optim.Adam, init_args: {lr: 0.2}}\n"),
    ],
    ids=["argument of the model", "optimizer of the model", "optimizer of LightningCLI"],
)
def test_which_entry_the_learning_rate_replaces(project, model, rest):
    text = CONFIG.replace("\n  class_path: watched.Watched\n", model)
    (project / "project.yaml").write_text(f"{text}{rest}", encoding="utf-8")
    found = YamlProject(["--config", "project.yaml"])
    found.check_learning_rates()
    parts = found.build(Run("FedAvg", 0.37, 1), found.strategy, project)
    assert rate_of(parts.module) == 0.37
    assert parts.trainer.max_epochs == 3
    assert str(parts.trainer.default_root_dir) == str(project)


def test_a_file_without_a_learning_rate_is_refused(project, capsys):
    (project / "project.yaml").write_text(CONFIG.replace("watched.Watched", "watched.NoRate"))
    assert main(command("--lr", "0.1")) == 2
    assert "compare: the learning rates of --lr replace optimizer.init_args.lr, the model's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "methods", "words"),
    [
        ([], ["FedAv"], "there is no method 'FedAv': did you mean 'FedAvg'? there are AAggFF, AdaFed, AFL, "),
        ([], ["FedAvg", "FedAvg"], "--methods must name each method once, found FedAvg FedAvg"),
        (["--trainer.strategy=auto"], ["FedAvg"], "trainer.strategy must be federated or a class_path"),
        (["--trainer.devices=2"], ["FedAvg"], "devices and num_nodes of the trainer must be 1, because a run is"),
        (["--trainer.max_epochs=-1"], ["FedAvg"], "max_epochs of the trainer must be a positive number of rounds"),
        (["--metric", "val_accuracy"], ["FedAvg"], "metric must be one of val_loss, val_acc, test_loss, test_acc, "),
        (["--ckpt_path", "some.ckpt"], ["FedAvg"], "ckpt_path must be left out of a comparison, found some.ckpt"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(project, capsys, monkeypatch, options, methods, words):
    monkeypatch.setattr(sys, "argv", [__file__])  # several processes need a program that they can run
    assert main(command(*options, methods=methods)) == 2
    assert f"compare: {words}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lr", "0"], "--lr: must be a positive number, found 0"),
        (["--seeds", "-1"], "--seeds: must not be negative, found -1"),
        (["--jobs", "0"], "--jobs: must be between 1 and 1,000, found 0"),
        (["--jobs", "many"], "--jobs: must be between 1 and 1,000, found many"),
        (["--trainer.max_epochz", "3"], "trainer"),
    ],
)
def test_options_out_of_range_and_unknown_ones_stop_the_command(project, capsys, options, words):
    with pytest.raises(SystemExit) as stop:
        main(command(*options))
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_a_method_that_trains_nothing_locally_does_not_fit_local_epochs(project, capsys):
    options = ["--trainer.strategy.init_args.local_epochs=2"]
    assert main(command(*options, methods=["FedAvg", "FedMDFG"])) == 2
    said = capsys.readouterr().err
    assert (
        "compare: FedMDFG does not fit the project's strategy: FedMDFG trains nothing locally: leave local_ep" in said
    )


def test_ctrl_c_stops_and_the_same_command_goes_on(project, capsys, monkeypatch):
    options = command("--seeds", "1", "--bounds", "none")
    start = watched.Watched.on_train_epoch_start

    def stopped(module):
        if module.trainer.current_epoch == 1 and type(module.trainer.strategy.algorithm).__name__ == "FedLF":
            raise KeyboardInterrupt
        start(module)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(watched.Watched, "on_train_epoch_start", stopped)
    assert main(options) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert "compare: stopped; the same command goes on from here" in capsys.readouterr().err
    monkeypatch.setattr(watched.Watched, "on_train_epoch_start", start)
    assert main(options) == 0
    assert watched.rounds(project).count("FedLFx3 0.1 0 0") == 1  # before Ctrl-C


def test_the_page_explains_every_option():
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
    options = {o for action in _parser()._actions for o in action.option_strings if o.startswith("--")}
    assert {option for option in options if f"`{option}`" not in page} <= {"--help", "--config"}


@pytest.mark.process
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize(
    ("rates", "bounds"), [(["0.1"], "pooled"), pytest.param(["0.1", "0.02"], "both", marks=pytest.mark.slow)]
)
def test_killed_and_given_again_it_gives_the_table_of_an_uninterrupted_one(project, rates, bounds):
    options = command("--lr", *rates, "--seeds", "2", "--bounds", bounds)
    (project / "whole").mkdir()
    assert main([*options, "--jobs", "2", "--folder", "whole"]) == 0
    expected = set(watched.rounds(project))
    (project / "rounds").unlink()
    # Two runs wait, in a process each.
    waiting = ["FedAvgx3 0.1 1 2", "FedLFx3 0.1 1 1"]
    (project / "wait").write_text("\n".join(waiting))
    command_line = [sys.executable, "-m", "fl_lightning", *options, "--jobs", "2"]
    with (project / "errors").open("wb") as errors:
        process = Copied(command_line, stdout=subprocess.DEVNULL, stderr=errors)
    try:
        deadline = time.monotonic() + 300
        while len(list(project.glob("waits at *"))) < 2:
            assert process.poll() is None, (project / "errors").read_text()
            assert time.monotonic() < deadline, watched.rounds(project)
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (project / "wait").unlink()
    finished, saved = (list((project / "comparison" / name).iterdir()) for name in ("runs", "checkpoints"))
    assert 3 * len(rates) <= len(finished) <= 6 * len(rates)
    assert {"FedAvg--lr-0.1--seed-1", "FedLF--lr-0.1--seed-1"} <= {folder.name for folder in saved}
    before = len(watched.rounds(project))
    assert main(options) == 0
    assert_same_results(project / "comparison", project / "whole")
    assert set(watched.rounds(project)) == expected
    again = watched.rounds(project)[before:]
    assert again[: 2 * len(rates)].count("FedAvgx3 0.1 1 2") == 1  # it waited there
    assert not {"FedAvgx3 0.1 1 0", "FedAvgx3 0.1 1 1", "FedLFx3 0.1 1 0", "FedAvgx3 0.1 0 0"} & set(again)
    assert not list((project / "comparison" / "checkpoints").iterdir())
