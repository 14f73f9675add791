# SPDX-License-Identifier: Apache-2.0
"""Projects of others, federated without touching them: the examples in examples/projects, and what Lightning ships.

Examples that need more packages than the tests do are skipped where these are not installed.
"""

import importlib
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos import mnist_datamodule, transformer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel, Net
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.loggers import CSVLogger

import fl_lightning as fl

PROJECTS = Path(__file__).parents[2] / "examples" / "projects"
EXAMPLES = sorted(p.stem for p in PROJECTS.glob("*.py") if "import fl_lightning" in p.read_text())
PACKAGES = {
    "image_classifier": "torch_uncertainty",
    "time_series": "pytorch_forecasting",
    "land_cover": "torchgeo",
    "tabular": "pytorch_tabular",
}


def plain(source: str) -> str:
    """The project as it was: without the lines marked ``# +``, and with those that stand behind ``# -``."""
    kept = [line for line in source.splitlines() if not line.endswith("# +")]
    return "\n".join(re.sub(r"^(\s*)# - ", r"\1", line) for line in kept) + "\n"


def changes(source: str) -> str:
    """The marked lines as a diff."""
    lines = []
    for line in source.splitlines():
        if line.endswith("# +"):
            lines.append("+" + line.removesuffix("# +").rstrip())
        elif (found := re.match(r"(\s*)# - (.*)", line)) is not None:
            lines.append("-" + found[1] + found[2])
    return "\n".join(lines)


@pytest.mark.parametrize("name", EXAMPLES)
def test_three_lines(name):
    source = (PROJECTS / f"{name}.py").read_text()
    assert 1 <= changes(source).count("\n+") + changes(source).startswith("+") <= 3
    before = plain(source)
    compile(before, name, "exec")
    assert re.findall(r"\bfl\.|fl_lightning|ederated", before) == []
    assert changes(source) in (PROJECTS / "README.md").read_text()


def test_every_example_is_listed():
    assert set(EXAMPLES) == {*PACKAGES, "boring", "language_model"}


@pytest.fixture
def project(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(PROJECTS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformer.WikiText2, "download", staticmethod(lambda path: None))  # it is there already
    return lambda name: importlib.import_module(name)


@pytest.fixture
def average(monkeypatch):
    """Whatever method a project asks for, it gets FedAvg."""
    strategy = fl.FederatedStrategy
    monkeypatch.setattr(
        fl, "FederatedStrategy", lambda algorithm, **options: strategy(fl.algorithms.FedAvg(), **options)
    )


def checkpoint(folder: Path, epoch: int) -> Path:
    (found,) = folder.glob(f"*epoch={epoch}-*.ckpt")
    return found


def assert_resumes(main, folder: Path, epochs: int = 2) -> Trainer:
    """The fit, and the same fit once more from its first round, end with the same bits."""
    trainer = main(folder / "whole", epochs=epochs)
    main(folder / "rest", epochs=epochs, resume=checkpoint(folder / "whole", 0))
    whole, rest = (torch.load(checkpoint(folder / f, epochs - 1), weights_only=False) for f in ("whole", "rest"))
    assert list(whole["state_dict"]) == list(rest["state_dict"])
    for name, value in whole["state_dict"].items():
        assert torch.equal(value, rest["state_dict"][name]), name
    assert whole["global_step"] == rest["global_step"]
    return trainer


def logged(folder: Path) -> str:
    """Everything that CSV loggers wrote."""
    return "\n".join(file.read_text() for file in folder.rglob("metrics.csv"))


def test_without_the_marked_lines_it_is_a_plain_project(project, tmp_path):
    scope = {"__name__": "plain"}
    exec(compile(plain((PROJECTS / "boring.py").read_text()), "boring", "exec"), scope)
    trainer = scope["main"](tmp_path, epochs=1)
    assert not isinstance(trainer.strategy, fl.FederatedStrategy)
    assert trainer.global_step == 64  # batches of one, undivided


@pytest.mark.filterwarnings("error:Detected call of:UserWarning")
def test_boring(project, tmp_path):
    trainer = assert_resumes(project("boring").main, tmp_path)
    assert isinstance(trainer.strategy.algorithm, fl.algorithms.FedMDFG)
    assert "lr-SGD" in logged(tmp_path / "whole")
    assert "fed/step_norm" in logged(tmp_path / "whole")


@pytest.mark.usefixtures("average")
def test_boring_with_fedavg(project, tmp_path):
    trainer = assert_resumes(project("boring").main, tmp_path)
    assert isinstance(trainer.strategy.algorithm, fl.algorithms.FedAvg)


def test_weights_load_where_this_package_is_not(project, tmp_path, monkeypatch):
    trainer = project("boring").main(tmp_path, epochs=1)
    for name in [name for name in sys.modules if name.split(".")[0] == "fl_lightning"]:
        monkeypatch.setitem(sys.modules, name, None)
    loaded = BoringModel.load_from_checkpoint(checkpoint(tmp_path, 0), weights_only=True)
    assert torch.equal(loaded.layer.weight, trainer.lightning_module.layer.weight)


def test_language_model(project, tmp_path, monkeypatch):
    made = importlib.import_module("made_data")
    monkeypatch.setattr(made, "text", partial(made.text, words=84))
    trainer = assert_resumes(project("language_model").main, tmp_path)
    assert trainer.strategy.last_round.client_ids == (0, 1, 2, 3)
    assert "fed/step_norm" in logged(tmp_path / "whole")


def test_stateful_batches_are_refused(project, tmp_path):
    """The LSTM demo carries its hidden state from batch to batch, and has a sampler that keeps batches in step."""
    importlib.import_module("made_data").text(Path("data/wikitext-2.txt"))
    data = fl.FederatedDataModule(LightningLSTM(), fl.data.IID(2))
    with pytest.raises(ValueError, match=r"LightningLSTM.train_dataloader\(\) must use batch_size=, found .*Sequence"):
        data.train_dataloader()


def test_manual_optimization(project, tmp_path):
    module = ManualOptimBoringModel()
    options = {"accelerator": "cpu", "enable_progress_bar": False, "enable_checkpointing": False, "logger": False}
    trainer = Trainer(max_epochs=1, strategy=fl.FederatedStrategy(fl.algorithms.FedMGDAPlus()), **options)
    trainer.fit(module, fl.FederatedDataModule(module, fl.data.IID(3)))
    assert trainer.strategy.last_round.client_ids == (0, 1, 2)
    trainer = Trainer(max_epochs=1, strategy=fl.FederatedStrategy(fl.algorithms.FedLF()), **options)
    with pytest.raises(ValueError, match="define federated_loss"):
        trainer.fit(module, fl.FederatedDataModule(module, fl.data.IID(3)))


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@pytest.mark.parametrize("algorithm", [fl.algorithms.FedAvg, fl.algorithms.FedFV])
def test_images_through_transforms_and_workers(project, tmp_path, monkeypatch, algorithm):
    """Lightning's MNIST data module, which drops last batches, and its demo network."""
    root = importlib.import_module("made_data").digits(tmp_path, train=140, test=40)
    monkeypatch.setattr(mnist_datamodule, "_DATASETS_PATH", str(root))  # it looks there first, and would download

    def main(folder, epochs, resume=None):
        torch.manual_seed(0)
        data = mnist_datamodule.MNISTDataModule(str(root), val_split=40, num_workers=1, normalize=True, batch_size=16)
        data = fl.FederatedDataModule(data, fl.data.Dirichlet(3, alpha=1.0))
        trainer = Trainer(
            max_epochs=epochs, accelerator="cpu", strategy=fl.FederatedStrategy(algorithm(), clients_per_round=2),
            logger=CSVLogger(folder), callbacks=[ModelCheckpoint(folder, save_top_k=-1)], enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(fl.ClientModule(Net(), loss=torch.nn.functional.nll_loss, num_classes=10), data, ckpt_path=resume)
        return trainer

    trainer = assert_resumes(main, tmp_path)
    assert set(trainer.strategy.last_evaluation.values) >= {"val_loss", "val_acc"}
    assert len(trainer.strategy.last_evaluation.client_ids) == 3


# ---- examples that need more packages


def needed(name: str) -> None:
    pytest.importorskip(PACKAGES[name], reason=f"{name} needs {PACKAGES[name]}")


def test_image_classifier(project, tmp_path):
    needed("image_classifier")
    trainer = assert_resumes(project("image_classifier").main, tmp_path)
    record = trainer.strategy.last_evaluation
    assert record.stage == "test"
    assert {"test/cls/Acc", "test/cal/ECE", "test/cls/NLL"} <= set(record.values)  # computed at the end of the test
    assert "fed/val/cls/Acc/angle" in logged(tmp_path / "whole")


def test_time_series(project, tmp_path):
    needed("time_series")
    trainer = assert_resumes(project("time_series").main, tmp_path)
    assert trainer.lightning_module.training_step_outputs == []


def test_land_cover(project, tmp_path):
    needed("land_cover")
    trainer = assert_resumes(project("land_cover").main, tmp_path)
    record = trainer.strategy.last_evaluation
    assert len(record.client_ids) == 2  # rural and urban
    assert {"val_loss", "val_MulticlassJaccardIndex"} <= set(record.values)


@pytest.mark.usefixtures("average")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["image_classifier", "time_series", "land_cover"])
def test_with_fedavg(project, tmp_path, name):
    needed(name)
    trainer = project(name).main(tmp_path, epochs=1)
    assert isinstance(trainer.strategy.algorithm, fl.algorithms.FedAvg)


def test_tabular(tmp_path):
    """In a process of its own, because it imports the other Lightning."""
    needed("tabular")
    lines = (
        "import sys, tabular, test_projects",
        "test_projects.assert_resumes(tabular.main, test_projects.Path(sys.argv[1]))",
    )
    paths = [str(PROJECTS), *map(str, list(Path(__file__).parents)[:3]), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "FL_LIGHTNING_TREE": "pytorch_lightning"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "fed/step_norm" in logged(tmp_path / "whole")
