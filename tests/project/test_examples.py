# SPDX-License-Identifier: Apache-2.0
"""The examples and the demo run, and show what they promise."""

import csv
import importlib
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.manual_seed(0)
    return importlib.import_module


def test_existing_project(example):
    (values,) = example("existing_project").main(rounds=14)
    assert values["fed/test_acc/mean"] > 0.6
    assert 0 <= values["fed/test_acc/angle"] < 0.6


def test_an_existing_project_changes_three_lines():
    source = (EXAMPLES / "existing_project.py").read_text()
    assert sum(line.rstrip().endswith(("# 1", "# 2", "# 3")) for line in source.splitlines()) == 3
    assert "fl_lightning" not in (EXAMPLES / "digits.py").read_text()


def test_plain_module(example, capsys):
    record = example("plain_module").main(rounds=11)
    assert record.values["val_acc"].mean() > 0.7
    assert "worst client" in capsys.readouterr().out


def test_aggregate_only(example):
    losses = example("aggregate_only").main(rounds=25)
    assert torch.all(losses < 0.3)


def test_federated_client(example, capsys):
    assert example("federated_client").main()
    assert "the weights are equal, bit for bit" in capsys.readouterr().out


def test_optuna_search(example, capsys):
    pytest.importorskip("optuna").logging.disable_default_handler()
    study = example("optuna_search").main(trials=3, rounds=3)
    assert len(study.trials) == 3
    assert set(study.best_params) == {"lr", "t"}
    assert 0 <= study.best_value <= 1
    assert "worst 10 % of the clients: accuracy " in capsys.readouterr().out


def test_demo(example, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path / "out"), "--rounds", "5"])
    example("demo").main()
    printed = capsys.readouterr().out
    for word in ("mean accuracy", "fairness angle", "worst 10 %", "conflicts per round, model", "client   samples"):
        assert word in printed
    assert (tmp_path / "out" / "demo.png").stat().st_size > 20_000
    assert "FedLF\u2069</h1>" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for method in ("FedAvg", "FedLF"):
        text = (tmp_path / "out" / method / "metrics.csv").read_text()
        rows = list(csv.DictReader(text.splitlines()))
        assert sum(row["fed/step_norm"] != "" for row in rows) == 5
        assert sum(row["fed/val_acc/angle"] != "" for row in rows) == 5
