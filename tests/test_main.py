# SPDX-License-Identifier: Apache-2.0
"""``python -m fl_lightning`` and the versions it prints."""

import io
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from fl_lightning import ops
from fl_lightning.__main__ import main
from fl_lightning._lightning import TREE
from fl_lightning.versions import show_versions, versions

ROOT = Path(__file__).parents[1]

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


def run(*arguments, cwd=None, without=()):
    hide = "".join(f"sys.modules[{name!r}] = None; " for name in without)
    code = f"import sys; {hide}import runpy; sys.argv[0] = 'fl'; runpy.run_module('fl_lightning', run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(cwd or ROOT)])}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_versions_are_those_installed():
    found = versions()
    assert found.torch == torch.__version__
    assert found.torchmetrics == metadata.version("torchmetrics")
    assert found.torchvision == metadata.version("torchvision")
    assert found.lightning_tree == TREE
    assert found.lightning == metadata.version("lightning" if TREE.startswith("lightning.") else "pytorch-lightning")
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.threads == torch.get_num_threads()
    assert (found.devices == ()) == (not torch.cuda.is_available() and not torch.backends.mps.is_available())
    assert dict(found.ops) == dict(ops.backend())


def test_info_prints_every_op_with_its_implementation_and_the_reason(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line for line in printed.splitlines() if line.strip()}
    assert {"fl_lightning", "python", "torch", "lightning", "torchmetrics", "torchvision"} <= set(rows)
    backends = ops.backend()
    assert {"layer_gram", "layer_combine", "min_norm"} <= set(backends)
    for name, backend in backends.items():
        assert rows[name].split()[1] == backend.implementation
        assert rows[name].endswith(backend.reason or "fastest")


def test_show_versions_writes_to_the_given_file(capsys):
    file = io.StringIO()
    show_versions(file)
    assert file.getvalue() == f"{versions()}\n"
    assert capsys.readouterr().out == ""


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(f"\n  {command}" in usage for command in ("info", "fit", "validate", "test", "predict"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: "),
        (["train"], "unknown command 'train'"),
        (["info", "-v"], r"info takes no options, found ['-v']"),
    ],
)
def test_a_wrong_command_line_prints_the_usage_and_fails(capsys, arguments, message):
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(message)
    assert "python -m fl_lightning COMMAND" in output.err


def test_fit_without_the_cli_extra_says_what_to_install():
    result = run("fit", "--help", without=["jsonargparse"])
    assert result.returncode == 1
    (sentence,) = result.stderr.strip().splitlines()
    assert sentence.startswith("this command needs the CLI extra, pip install 'fl-lightning[cli]'")


def test_info_works_without_the_cli_extra():
    result = run("info", without=["jsonargparse"])
    assert result.returncode == 0, result.stderr
    assert "layer_gram" in result.stdout


@pytest.fixture
def project(tmp_path):
    (tmp_path / "blobs.py").write_text(BLOBS, encoding="utf-8")
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


def test_fit_then_test_from_yaml(project):
    fit = run("fit", "--config", "config.yaml", cwd=project)
    assert fit.returncode == 0, fit.stderr
    (checkpoint,) = project.rglob("*.ckpt")
    assert torch.load(checkpoint, weights_only=True)["epoch"] == 1  # two rounds
    test = run("test", "--config", "config.yaml", "--ckpt_path", str(checkpoint), cwd=project)
    assert test.returncode == 0, test.stderr
    assert "test_acc" in test.stdout


def test_the_printed_configuration_runs_again(project):
    printed = run("fit", "--config", "config.yaml", "--print_config", cwd=project)
    assert printed.returncode == 0, printed.stderr
    (project / "printed.yaml").write_text(printed.stdout, encoding="utf-8")
    again = run("fit", "--config", "printed.yaml", "--print_config", cwd=project)
    assert again.returncode == 0, again.stderr
    assert again.stdout == printed.stdout
    fit = run("fit", "--config", "printed.yaml", "--trainer.fast_dev_run=true", cwd=project)
    assert fit.returncode == 0, fit.stderr
