# SPDX-License-Identifier: Apache-2.0
"""A federated fit as a YAML file says: every part of the strategy by class_path, printed, saved and run again."""

import contextlib
import functools
import io
import sys
from pathlib import Path

import pytest
import torch
from support import Blobs, Classifier, fresh, quiet_trainer, weights

import fl_lightning as fl

pytest.importorskip("jsonargparse")

ROOT = Path(__file__).parents[2]

CONFIG = """
seed_everything: 7
trainer:
  accelerator: cpu
  max_epochs: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: fl_lightning.FederatedStrategy
    init_args:
      algorithm:
        class_path: fl_lightning.algorithms.FedLF
        init_args: {layers: tensor}
      client:
        class_path: fl_lightning.algorithms.FedProx
        init_args: {mu: 0.1}
      clients_per_round: 0.5
      local_epochs: 2
      sampler: {class_path: fl_lightning.data.SizeWeightedSampler}
      server_optimizer:
        class_path: torch.optim.SGD
        init_args: {lr: 0.5, momentum: 0.9}
      client_optimizer_state: keep
      buffers: largest
      fairness_metric: val_acc
      on_client_error: drop
      seed: 3
model:
  class_path: support.Classifier
  init_args: {lr: 0.05, momentum: 0.9}
data:
  class_path: fl_lightning.FederatedDataModule
  init_args:
    data: {class_path: support.Blobs, init_args: {train: 120}}
    partition:
      class_path: fl_lightning.data.Dirichlet
      init_args: {num_clients: 6, alpha: 0.5}
    seed: 1
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fl_lightning"])
    # Without a logger Lightning saves a config.yaml of its own in this directory.
    path = tmp_path / "project.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


def cli(*arguments):
    from fl_lightning.lightning.names import LightningCLI, LightningDataModule, LightningModule

    return LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        args=[str(argument) for argument in arguments],
    )


def printed(path):
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), pytest.raises(SystemExit) as stop:
        cli("fit", "--config", path, "--print_config")
    assert stop.value.code in (0, None)
    return stream.getvalue()


@functools.cache
def by_hand():
    torch.manual_seed(7)
    module = Classifier(lr=0.05, momentum=0.9)
    strategy = fl.FederatedStrategy(
        fl.algorithms.FedLF(layers="tensor"),
        client=fl.algorithms.FedProx(mu=0.1),
        clients_per_round=0.5,
        local_epochs=2,
        sampler=fl.data.SizeWeightedSampler(),
        server_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        client_optimizer_state="keep",
        buffers="largest",
        fairness_metric="val_acc",
        on_client_error="drop",
        seed=3,
    )
    quiet_trainer(strategy, 2).fit(module, fl.FederatedDataModule(Blobs(train=120), fl.data.Dirichlet(6, 0.5), seed=1))
    return module, strategy


def test_fit_does_what_the_file_says(config):
    run = cli("fit", "--config", config)
    strategy, (expected, expected_strategy) = run.trainer.strategy, by_hand()
    assert type(strategy.algorithm) is fl.algorithms.FedLF
    assert type(strategy.client_rule) is type(expected_strategy.client_rule)
    assert type(strategy.options.sampler) is fl.data.SizeWeightedSampler
    objects = {"algorithm", "client", "client_rule", "server_optimizer", "sampler", "executor", "method"}
    chosen, wanted = (
        {k: v for k, v in vars(s.options).items() if k not in objects} for s in (strategy, expected_strategy)
    )
    assert chosen == wanted
    assert strategy.last_round.client_ids == expected_strategy.last_round.client_ids
    assert len(strategy.last_round.client_ids) == 3
    assert torch.equal(weights(run.model), weights(expected))
    assert not torch.equal(weights(run.model), weights(fresh(seed=7, lr=0.05, momentum=0.9)))


def test_the_printed_configuration_runs_to_the_same_weights(config, tmp_path):
    text = printed(config)
    assert "momentum: 0.9" in text
    again = tmp_path / "printed.yaml"
    again.write_text(text, encoding="utf-8")
    assert printed(again) == text
    expected = weights(by_hand()[0])
    assert torch.equal(expected, weights(cli("fit", "--config", again).model))
    # A value on the command line overrides the file.
    other = cli("fit", "--config", again, "--trainer.strategy.init_args.seed", "4")
    assert not torch.equal(expected, weights(other.model))


def test_strategy_by_name_and_its_arguments_on_the_command_line(config):
    named = cli("fit", "--config", config, "--trainer.strategy", "federated")
    assert type(named.trainer.strategy) is fl.FederatedStrategy
    assert len(named.trainer.strategy.last_round.client_ids) == 6
    given = cli(
        "fit", "--config", config, "--trainer.strategy", "fl_lightning.FederatedStrategy",
        "--trainer.strategy.algorithm", "fl_lightning.algorithms.SCAFFOLD", "--trainer.strategy.clients_per_round", "2",
    )  # fmt: skip
    strategy = given.trainer.strategy
    assert type(strategy.algorithm) is fl.algorithms.SCAFFOLD
    assert len(strategy.last_round.client_ids) == 2  # a count, not the fraction 2.0
