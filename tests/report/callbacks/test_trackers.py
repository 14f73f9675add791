# SPDX-License-Identifier: Apache-2.0
"""Where trackers show fairness and clients: the example, and each tracker's own record of the run."""

import csv
import importlib
import sqlite3
from pathlib import Path

import pytest
from callback_fakes import evaluation_record, fake_trainer, validate

from fl_lightning.report.callbacks import ClientTable

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = Path(__file__).parents[3] / "examples"
ROUNDS = 3
LOGGED = ("val_acc", "fed/val_acc/mean", "fed/val_acc/worst_10", "fed/val_acc/angle", "fed/conflicts")
OWN = tuple(f"fed/val_acc/client/{client}" for client in range(6))


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the example with a tracker; returns its trainer."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("trackers")
    return lambda tracker: example.main(tracker, tmp_path / tracker, ROUNDS)


def stages(path):
    with path.open(newline="") as file:
        return {row["stage"] for row in csv.DictReader(file)}


def test_tensorboard(run, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = run("tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "digits" / "version_0"))
    events.Reload()
    for name in (*LOGGED, *OWN):
        assert len(events.Scalars(name)) == ROUNDS, name
    last = float(trainer.strategy.last_evaluation.values["test_acc"][2])
    assert events.Scalars("fed/test_acc/client/2")[-1].value == pytest.approx(last)
    for stage in ("val", "test"):
        (text,) = events.Tensors(f"clients/{stage}/text_summary")
        (shown,) = text.tensor_proto.string_val
        assert text.step == ROUNDS
        assert b"worst client" in shown
        assert f"{stage} after {ROUNDS} rounds: 6 clients".encode() in shown
    assert stages(tmp_path / "tensorboard" / "digits" / "version_0" / "clients.csv") == {"val", "test"}


def test_csv(run, tmp_path):
    run("csv")
    folder = tmp_path / "csv" / "digits" / "version_0"
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for name in (*LOGGED, *OWN):
        assert sum(row[name] != "" for row in rows) == ROUNDS, name
    assert stages(folder / "clients.csv") == {"val", "test"}


def test_mlflow(run, tmp_path):
    pytest.importorskip("mlflow", reason="pip install mlflow")
    trainer = run("mlflow")
    client, identity = trainer.logger.experiment, trainer.logger.run_id
    for name in (*LOGGED, *OWN):
        assert len(client.get_metric_history(identity, name)) == ROUNDS, name
    assert [file.path for file in client.list_artifacts(identity)] == ["clients.csv"]
    (kept,) = (tmp_path / "mlflow" / "artifacts").rglob("clients.csv")
    (local,) = (tmp_path / "mlflow" / trainer.logger.name / identity).iterdir()
    assert kept.read_text() == local.read_text()
    assert stages(kept) == {"val", "test"}
    with sqlite3.connect(tmp_path / "mlflow" / "mlflow.db") as database:
        found = database.execute("select max(value) from metrics where key = 'fed/test_acc/mean'").fetchone()
    assert found[0] == pytest.approx(float(trainer.callback_metrics["fed/test_acc/mean"]))


def test_wandb(run, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "of wandb"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    trainer = run("wandb")
    summary = dict(trainer.logger.experiment.summary)
    assert summary["fed/test_acc/mean"] == pytest.approx(float(trainer.callback_metrics["fed/test_acc/mean"]))
    assert {*LOGGED, *OWN} <= set(summary)
    identity = trainer.logger.version
    wandb.finish()
    (file,) = (tmp_path / "wandb" / "wandb").rglob("*.wandb")
    assert f"clients-{identity}".encode() in file.read_bytes()
    assert stages(tmp_path / "wandb" / "digits" / identity / "clients.csv") == {"val", "test"}


@pytest.fixture
def given(monkeypatch):
    """The stages of the tables that loggers got."""
    tables = []
    monkeypatch.setattr(
        "fl_lightning.report.callbacks.client_table.hand_over",
        lambda trainer, path, title, text, step: tables.append((title, step)),
    )
    return tables


def test_a_fit_hands_its_table_over_once_at_its_end(tmp_path, given):
    table, trainer = ClientTable(tmp_path), fake_trainer()
    table.on_fit_start(trainer, None)
    for number in (1, 2):
        validate(table, trainer, evaluation_record(number))
    assert given == []
    table.on_fit_end(trainer, None)
    table.on_fit_end(trainer, None)
    assert given == [("clients/val", 2)]
    trainer.state.fn = "validate"
    validate(table, trainer, evaluation_record(3))
    assert given[1:] == [("clients/val", 3)]


def test_the_table_stays_here_if_asked(tmp_path, given):
    table, trainer = ClientTable(tmp_path, artifact=False), fake_trainer()
    validate(table, trainer, evaluation_record(1))
    table.on_fit_end(trainer, None)
    assert given == []
    assert (tmp_path / "clients.csv").exists()
