# SPDX-License-Identifier: Apache-2.0
"""Libraries save the arguments of the Trainer that they make, the strategy among them, as a model's hyperparameters."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from support import Classifier, blobs, training_only
from torch.utils.data import DataLoader

import fl_lightning as fl
from fl_lightning.lightning.names import TREE


class TrainsItself(Classifier):
    def __init__(self, **trainer_kwargs):
        super().__init__()
        self.save_hyperparameters()
        self.trainer_kwargs = trainer_kwargs


class Named(fl.FederatedStrategy):
    def __init__(self, name, **options):
        super().__init__(**options)
        self.name = name


def test_a_checkpoint_holds_the_strategy_by_its_arguments(tmp_path):
    strategy = Named("mine", partition=fl.data.IID(3), clients_per_round=2)
    module = TrainsItself(strategy=strategy)
    trainer = training_only(
        strategy, 1, callbacks=[ModelCheckpoint(tmp_path)], enable_checkpointing=True, logger=CSVLogger(tmp_path)
    )
    trainer.fit(module, DataLoader(blobs(60), batch_size=10))
    (file,) = tmp_path.glob("*.ckpt")
    saved = torch.load(file, weights_only=False)["hyper_parameters"]["strategy"]
    for other in (saved, copy.deepcopy(strategy)):
        assert (type(other), other.name) == (Named, "mine")
        assert (other.last_round, strategy.last_round.round) == (None, 0)
        training_only(other, 1).fit(TrainsItself(), DataLoader(blobs(60), batch_size=10))
        assert other.last_round.client_ids == strategy.last_round.client_ids
        assert len(other.last_round.client_ids) == 2


def test_a_strategy_with_other_arguments_shares_nothing_with_the_first():
    strategy = Named("mine", algorithm=fl.algorithms.FedLF(layers="tensor"), clients_per_round=2, seed=4)
    other = strategy.with_arguments(seed=5, local_epochs=3)
    assert (type(other), other.name, other.options.seed, other.options.local_epochs) == (Named, "mine", 5, 3)
    assert (other.options.clients_per_round, other.algorithm.layers) == (2, "tensor")
    assert other.algorithm is not strategy.algorithm
    assert other.arguments.keys() == {"name", "algorithm", "clients_per_round", "seed", "local_epochs"}
    plain = fl.FederatedStrategy(fl.algorithms.FedAvg(), None, 0.5).with_arguments(clients_per_round=3)
    assert (type(plain.algorithm), plain.options.clients_per_round) == (fl.algorithms.FedAvg, 3)
    with pytest.raises(ValueError, match=r"local_epochs of Named must be a positive integer .*, found 0"):
        strategy.with_arguments(local_epochs=0)
    assert TREE in repr(strategy), "a Trainer of another copy of Lightning refuses the strategy, and shows it"
