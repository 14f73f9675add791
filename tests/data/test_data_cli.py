# SPDX-License-Identifier: Apache-2.0
import sys
import types

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fl_lightning import data as fd
from fl_lightning.lightning.names import LightningDataModule, LightningModule

pytest.importorskip("jsonargparse")


class CliModule(LightningDataModule):
    def __init__(self, n: int = 40, root: str = "."):
        super().__init__()
        self.save_hyperparameters()
        self.set = TensorDataset(torch.zeros(n, 2), torch.arange(n) % 4)

    def train_dataloader(self):
        return DataLoader(self.set, batch_size=5, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.set, batch_size=5)


class CliDataset(Dataset):
    def __init__(self, n: int = 40):
        self.targets = [i % 4 for i in range(n)]
        self.owner = [f"o{i % 3}" for i in range(n)]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return torch.zeros(2), self.targets[index]


class CliNet(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 4)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def kind_of(sample) -> int:
    return sample[1] % 2


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Configuration files name classes by import path; test files have none."""
    module = types.ModuleType("cli_project")
    for thing in (CliModule, CliDataset, CliNet, kind_of):
        monkeypatch.setattr(thing, "__module__", "cli_project")
        setattr(module, thing.__name__, thing)
    monkeypatch.setitem(sys.modules, "cli_project", module)
    monkeypatch.setattr(sys, "argv", ["prog"])


def cli(config, tmp_path, extra=()):
    from fl_lightning.lightning.names import LightningCLI

    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return LightningCLI(
        CliNet,
        run=False,
        save_config_callback=None,
        args=["--config", str(path), *extra],
        seed_everything_default=False,
    )


def wrap(partition, data=None, **init_args):
    data = data or {"class_path": "cli_project.CliModule", "init_args": {"n": 24}}
    return {
        "data": {
            "class_path": "fl_lightning.data.FederatedDataModule",
            "init_args": {"data": data, "partition": partition, **init_args},
        }
    }


CLASSES = [  # docs/data.md has the other partitions, which tests/arguments reads
    ("Unbalanced", {"groups": [[0], [1, 2, 3]]}, fd.Unbalanced(((0,), (1, 2, 3)))),
    ("ByKey", {"keys": [1, 2] * 12}, fd.ByKey([1, 2] * 12)),
    ("ByKey", {"keys": {"train": ["a", "b"] * 12}}, fd.ByKey({"train": ["a", "b"] * 12})),
    ("AvailabilitySampler", {"availability": [0.5, 1.0]}, fd.AvailabilitySampler((0.5, 1.0))),
    *((name, {}, getattr(fd, name)()) for name in ("UniformSampler", "SizeWeightedSampler", "AllClients")),
]


@pytest.mark.parametrize(("name", "init_args", "expected"), CLASSES)
def test_partitions_and_samplers_from_yaml(name, init_args, expected):
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_argument("--made", type=fd.Partition if isinstance(expected, fd.Partition) else fd.CohortSampler)
    value = {"class_path": f"fl_lightning.data.{name}", "init_args": init_args}
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the older name
    assert instantiate(parser.parse_object({"made": value})).made == expected


def test_datasets_labels_and_ready_parts_from_yaml(tmp_path):
    dataset = {"class_path": "cli_project.CliDataset", "init_args": {"n": 12}}
    mutex = {"class_path": "fl_lightning.data.Mutex", "init_args": {"num_clients": 2}}
    made = cli(wrap(mutex, dataset, val=dataset, labels="cli_project.kind_of", batch_size=4), tmp_path).datamodule
    assert {tuple(row) for row in made.label_counts().tolist()} == {(6, 0), (0, 6)}
    assert made.train_dataloader().batch_size == 4
    assert len(made.val_dataloader()) == 2
    owners = {"class_path": "fl_lightning.data.ByKey", "init_args": {"keys": "owner"}}
    made = cli(wrap(owners, dataset, holdout=0.25, holdout_stage="test"), tmp_path).datamodule
    assert made.client_sizes.tolist() == [3, 3, 3]
    iid = {"class_path": "fl_lightning.data.IID", "init_args": {"num_clients": 2}}
    assert len(cli(wrap(iid, dataset, labels="owner"), tmp_path).datamodule.train_dataloader()) == 2
    made = cli(wrap([[0, 1, 2], [5, 6]], dataset, labels=[0, 1] * 6), tmp_path).datamodule
    assert made.label_counts().tolist() == [[2, 1], [1, 1]]


def test_print_config_round_trip(tmp_path, capsys):
    config = wrap({"class_path": "fl_lightning.data.Dirichlet", "init_args": {"num_clients": 3, "alpha": 0.5}})
    with pytest.raises(SystemExit):
        cli(config, tmp_path, ["--print_config"])
    printed = capsys.readouterr().out
    assert "class_path: fl_lightning.data" in printed
    again = cli(yaml.safe_load(printed), tmp_path).datamodule
    assert again.partition == fd.Dirichlet(3, 0.5)
    assert len(again.data.set) == 24
