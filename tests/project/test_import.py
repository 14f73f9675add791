# SPDX-License-Identifier: Apache-2.0
"""What ``import fl_lightning`` costs and which copy of Lightning it joins. Each case needs a fresh interpreter."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ROOT / "fl_lightning" / "lightning" / "names.py"
# Looked up, not imported: a copy imported here would become this session's.
needs_both = pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed")


def printed(result):
    """What a program printed last, read as JSON."""
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


IMPORT = """
import hashlib, json, pickle, random, sys, time, warnings
import numpy, torch, lightning.pytorch
def settings():
    states = (random.getstate(), torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist())
    return [hashlib.sha256(pickle.dumps(states)).hexdigest(), torch.get_num_threads(), str(torch.get_default_dtype()),
            torch.is_grad_enabled(), torch.initial_seed(), len(warnings.filters)]
modules, before = set(sys.modules), settings()
start = time.process_time()
import fl_lightning
seconds = time.process_time() - start
added = sorted({name.partition(".")[0] for name in set(sys.modules) - modules})
after = settings()
import fl_lightning.report.callbacks
of_parts = sorted({name.partition(".")[0] for name in set(sys.modules) - modules})
print(json.dumps({"seconds": seconds, "added": added, "of_parts": of_parts, "before": before, "after": after}))
"""


@pytest.fixture(scope="module")
def imported(interpreter_with_lightning):
    return printed(interpreter_with_lightning(IMPORT))


def test_import_adds_less_than_a_second_to_lightnings_own(imported, interpreter_with_lightning):
    # CPU time; a second try because the first one may have had to write byte code.
    assert imported["seconds"] < 1.0 or printed(interpreter_with_lightning(IMPORT))["seconds"] < 1.0


def test_import_loads_nothing_that_only_extras_or_users_need(imported):
    assert "fl_lightning" in imported["added"]
    unwanted = {
        "torchvision",
        "matplotlib",
        "plotly",
        "sklearn",
        "scipy",
        "pandas",
        "jsonargparse",
        "rich",
        "tensorboard",
    }
    assert not set(imported["added"]) & (unwanted | {"pytorch_lightning", "clarabel", "IPython", "triton"})
    assert not set(imported["of_parts"]) & unwanted


def test_import_leaves_generators_and_global_settings_alone(imported):
    assert imported["before"] == imported["after"]


FIT = """
import json, logging, warnings
warnings.simplefilter("ignore")
{first}
import fl_lightning as fl
import torch
from torch.utils.data import DataLoader, TensorDataset
from fl_lightning.lightning.names import TREE, Trainer
import {tree} as pl

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=5)
    val_dataloader = train_dataloader

pl.seed_everything(0)
model = Model()
data = fl.FederatedDataModule(Data(), fl.data.IID(num_clients=4), seed=0)
strategy = {strategy}
trainer = pl.Trainer(max_epochs=2, strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False)
trainer.fit(model, data)
print(json.dumps([TREE, Trainer is pl.Trainer, trainer.current_epoch, trainer.callback_metrics["val_loss"].item(),
                  model.layer.weight.flatten().tolist()]))
"""
FEDERATED = "fl.FederatedStrategy(fl.algorithms.FedAvg(), clients_per_round=2, seed=0)"


@needs_both
def test_a_project_on_pytorch_lightning_trains_as_one_on_lightning(capsys, interpreter):
    other = printed(
        interpreter(FIT.format(tree="pytorch_lightning", first="import pytorch_lightning", strategy=FEDERATED))
    )
    exec(
        FIT.format(tree="lightning.pytorch", first="import lightning.pytorch", strategy=FEDERATED),
        {"__name__": "project"},
    )
    usual = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [other[:3], usual[:3]] == [["pytorch_lightning", True, 2], ["lightning.pytorch", True, 2]]
    assert other[3:] == usual[3:]


@needs_both
@pytest.mark.slow
def test_the_variable_chooses_the_tree_and_the_strategy_is_known_by_name(interpreter):
    code = FIT.format(tree="pytorch_lightning", first="", strategy='"federated"')
    assert printed(interpreter(code, FL_LIGHTNING_TREE="pytorch_lightning"))[:3] == ["pytorch_lightning", True, 2]


def test_an_unknown_tree_is_refused(interpreter):
    code = (
        "import importlib.util, json\n"
        f"spec = importlib.util.spec_from_file_location('seam', {str(NAMES)!r})\n"
        "try:\n    spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "except ImportError as error:\n    print(json.dumps(str(error)))"
    )
    assert "FL_LIGHTNING_TREE must be one of" in printed(interpreter(code, FL_LIGHTNING_TREE="lightning.fabric"))
