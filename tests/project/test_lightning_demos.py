# SPDX-License-Identifier: Apache-2.0
"""What Lightning ships to try things with, federated: its demo modules and data."""

import importlib
import sys
from pathlib import Path

import project_runs
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos import mnist_datamodule, transformer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel, Net
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.loggers import CSVLogger
from project_runs import checkpoint, federated_fit, main_of, plain, source, unequal

import fl_lightning as fl


@pytest.fixture(autouse=True)
def scripts(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(project_runs.PROJECTS))
    monkeypatch.chdir(tmp_path)


def test_without_the_marked_lines_it_is_a_plain_project(tmp_path):
    trainer = main_of(plain(source("boring")), "boring")(tmp_path, epochs=1)
    assert not isinstance(trainer.strategy, fl.FederatedStrategy)
    assert trainer.global_step == 64  # batches of one, undivided


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


def test_manual_optimization():
    module = ManualOptimBoringModel()
    options = {"accelerator": "cpu", "enable_progress_bar": False, "enable_checkpointing": False, "logger": False}
    trainer = Trainer(max_epochs=1, strategy=fl.FederatedStrategy(fl.algorithms.FedMGDAPlus()), **options)
    trainer.fit(module, fl.FederatedDataModule(module, fl.data.IID(3)))
    assert trainer.strategy.last_round.client_ids == (0, 1, 2)
    trainer = Trainer(max_epochs=1, strategy=fl.FederatedStrategy(fl.algorithms.FedLF()), **options)
    with pytest.raises(ValueError, match="define federated_loss"):
        trainer.fit(module, fl.FederatedDataModule(module, fl.data.IID(3)))


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
def test_images_through_transforms_and_workers(tmp_path, monkeypatch):
    """Lightning's MNIST data module, which drops last batches, and its demo network."""
    root = importlib.import_module("made_data").digits(tmp_path, train=140, test=40)
    monkeypatch.setattr(mnist_datamodule, "_DATASETS_PATH", str(root))  # it looks there first, and would download

    def main(folder, resume=None):
        torch.manual_seed(0)
        data = mnist_datamodule.MNISTDataModule(str(root), val_split=40, num_workers=1, normalize=True, batch_size=16)
        data = fl.FederatedDataModule(data, fl.data.Dirichlet(3, alpha=1.0))
        trainer = Trainer(
            max_epochs=2, accelerator="cpu", strategy=fl.FederatedStrategy(fl.algorithms.FedFV(), clients_per_round=2),
            logger=CSVLogger(folder), callbacks=[ModelCheckpoint(folder, save_top_k=-1)], enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(fl.ClientModule(Net(), loss=torch.nn.functional.nll_loss, num_classes=10), data, ckpt_path=resume)
        return trainer

    whole = main(tmp_path / "whole")
    rest = main(tmp_path / "rest", resume=checkpoint(tmp_path / "whole", 0))
    assert unequal(whole.lightning_module.state_dict(), rest.lightning_module.state_dict()) == []
    assert set(whole.strategy.last_evaluation.values) >= {"val_loss", "val_acc"}
    assert len(whole.strategy.last_evaluation.client_ids) == 3
