# SPDX-License-Identifier: Apache-2.0
"""``python -m fl_lightning`` and the versions it prints."""

import contextlib
import io
import re
import sys
from importlib import metadata

import pytest
import torch

import fl_lightning as fl
from fl_lightning import ops
from fl_lightning.__main__ import main
from fl_lightning.lightning.names import TREE
from fl_lightning.lightning.versions import show_versions, versions

CONFIG = """
seed_everything: 1
trainer:
  strategy: federated
  max_epochs: 2
  accelerator: cpu
  enable_progress_bar: false
  enable_model_summary: false
model:
  class_path: fl_lightning.ClientModule
  init_args:
    net: {class_path: torch.nn.Linear, init_args: {in_features: 4, out_features: 2}}
    num_classes: 2
data:
  class_path: fl_lightning.FederatedDataModule
  init_args:
    data: {class_path: blobs.Blobs}
    partition: {class_path: fl_lightning.data.IID, init_args: {num_clients: 3}}
    seed: 0
"""

BLOBS = """
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset


class Blobs(LightningDataModule):
    def _loader(self):
        targets = torch.arange(60) % 2
        inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)) + 2.0 * targets.unsqueeze(1)
        return DataLoader(TensorDataset(inputs, targets), batch_size=10)

    train_dataloader = val_dataloader = test_dataloader = _loader
"""


def test_versions_are_those_installed():
    found, tree = versions(), "lightning" if TREE.startswith("lightning.") else "pytorch-lightning"
    assert found["torch"].startswith(f"{torch.__version__} (")
    assert found["torchmetrics"] == metadata.version("torchmetrics")
    assert found["torchvision"] == metadata.version("torchvision")
    assert found["lightning"] == f"{metadata.version(tree)} ({TREE})"
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["CPU threads"] == str(torch.get_num_threads())
    able = torch.cuda.is_available() or torch.backends.mps.is_available()
    assert (found["accelerators"] == "none") != able


def test_info_prints_every_op_with_its_implementation_and_the_reason(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line for line in printed.splitlines() if line.strip()}
    assert len(printed.splitlines()) < 20
    assert {"fl_lightning", "python", "torch", "lightning", "torchmetrics", "torchvision"} <= set(rows)
    backends = ops.backend()
    assert {"layer_gram", "layer_combine", "min_norm"} <= set(backends)
    for name, backend in backends.items():
        group = next(text for text in printed.split("\n\n") if re.search(rf"\b{name}\b", text))
        assert f" ops run as {backend.implementation} ({backend.reason or 'the fastest'}):\n" in group


def test_show_versions_writes_to_the_given_file(capsys):
    file = io.StringIO()
    show_versions(file)
    assert all(f"{name:<16}{value}\n" in file.getvalue() for name, value in versions().items())
    assert capsys.readouterr().out == ""


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fl_lightning {fl.__version__}\n"


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(f"\n  {command}" in usage for command in ("info", "fit", "validate", "test", "predict"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "usage: "), (["train"], "unknown command 'train'"), (["info", "-v"], r"info takes no options, found ['-v']")],
)
def test_a_wrong_command_line_prints_the_usage_and_fails(capsys, arguments, message):
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(message)
    assert "python -m fl_lightning COMMAND" in output.err


WITHOUT_JSONARGPARSE = """
import importlib.metadata as metadata, sys
sys.modules["jsonargparse"] = None
installed = metadata.distribution
def distribution(name):
    if name.startswith("jsonargparse"):
        raise metadata.PackageNotFoundError(name)
    return installed(name)
metadata.distribution = distribution
from fl_lightning.__main__ import main
sys.exit([main(["info"]), main(["fit", "--help"])] != [0, 1])
"""


def test_without_the_cli_extra_info_works_and_fit_says_what_to_install(interpreter):
    result = interpreter(WITHOUT_JSONARGPARSE)
    assert result.returncode == 0, result.stderr
    assert "layer_gram" in result.stdout
    (sentence,) = result.stderr.strip().splitlines()
    assert sentence.startswith("this command needs the CLI extra (")
    assert sentence.endswith("): pip install '.[cli]' in a checkout, pip install 'fl-lightning[cli]' for a release")


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs a command in a directory with a project, and returns what it printed."""
    pytest.importorskip("jsonargparse")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "blobs.py").write_text(BLOBS, encoding="utf-8")
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fl_lightning", *arguments])
        capsys.readouterr()
        assert main(list(arguments)) == 0
        return capsys.readouterr().out

    yield run
    sys.modules.pop("blobs", None)


def test_fit_then_test_from_yaml(command, tmp_path):
    last = command("fit", "--config", "config.yaml").splitlines()[-1]
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    said = re.fullmatch(
        r"FedAvg has trained for 2 rounds\. val_acc in validation: mean of 3 clients \d\.\d+, worst 10 % "
        r"\d\.\d+\. Model: (.*)\. Logs: (.*)\.",
        last,
    )
    assert said[1] == str(checkpoint)
    assert checkpoint.is_relative_to(said[2])
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["epoch"] == 1  # two rounds
    assert "test_acc" in command("test", "--config", "config.yaml", "--ckpt_path", str(checkpoint))


def test_the_printed_configuration_is_complete_and_runs(command, tmp_path):
    first = printed_config(command, "config.yaml")
    assert "FederatedDataModule" in first
    (tmp_path / "printed.yaml").write_text(first, encoding="utf-8")
    assert printed_config(command, "printed.yaml") == first
    options = ("--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.default_root_dir=run")
    for _ in range(2):  # Lightning would save a config.yaml and refuse to overwrite it
        said = command("fit", "--config", "printed.yaml", *options)
        assert said.splitlines()[-1].endswith(". The model was not saved.")
    assert not list((tmp_path / "run").glob("*.yaml"))


def printed_config(command, config):
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), pytest.raises(SystemExit) as stop:
        command("fit", "--config", config, "--print_config")
    assert stop.value.code in (0, None)
    return stream.getvalue()
