# SPDX-License-Identifier: Apache-2.0
"""What Lightning ships to try things with, federated: its demo modules and data."""

import importlib
import sys
from pathlib import Path

import project_runs
import pytest
import torch
from lightning.pytorch.demos import transformer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.demos.lstm import LightningLSTM
from project_runs import checkpoint, federated_fit, unequal

import fl_lightning as fl


@pytest.fixture(autouse=True)
def scripts(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(project_runs.PROJECTS))
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("error:Detected call of:UserWarning")
def test_gradients_are_uploaded_without_a_warning_of_schedulers(tmp_path):
    trainer = federated_fit("boring", "lightning.pytorch", tmp_path, 1).trainer
    assert isinstance(trainer.strategy.algorithm, fl.algorithms.FedMDFG)
    logged = "\n".join(file.read_text() for file in tmp_path.rglob("metrics.csv"))
    assert "lr-SGD" in logged
    assert "fed/step_norm" in logged


def test_weights_load_where_this_package_is_not(tmp_path, monkeypatch):
    trainer = importlib.import_module("boring").main(tmp_path, epochs=1)
    for name in [name for name in sys.modules if name.split(".")[0] == "fl_lightning"]:
        monkeypatch.setitem(sys.modules, name, None)
    loaded = BoringModel.load_from_checkpoint(checkpoint(tmp_path, 0), weights_only=True)
    assert torch.equal(loaded.layer.weight, trainer.lightning_module.layer.weight)


@pytest.fixture
def no_download(monkeypatch):
    """The text is there already; Lightning's demo would import requests before it looks."""
    monkeypatch.setattr(transformer.WikiText2, "download", staticmethod(lambda path: None))


@pytest.mark.usefixtures("no_download")
def test_language_model(tmp_path):
    whole = federated_fit("language_model", "lightning.pytorch", tmp_path / "whole", 2)
    start = checkpoint(tmp_path / "whole", 0)
    rest = federated_fit("language_model", "lightning.pytorch", tmp_path / "rest", 2, resume=start)
    assert unequal(whole.weights, rest.weights) == []
    assert whole.trainer.strategy.last_round.client_ids == (0, 1, 2, 3)


@pytest.mark.usefixtures("no_download")
def test_stateful_batches_are_refused():
    """The LSTM demo carries its hidden state from batch to batch, and has a sampler that keeps batches in step."""
    importlib.import_module("made_data").text(Path("data/wikitext-2.txt"))
    data = fl.FederatedDataModule(LightningLSTM(), fl.data.IID(2))
    with pytest.raises(ValueError, match=r"LightningLSTM.train_dataloader\(\) must use batch_size=, found .*Sequence"):
        data.train_dataloader()
