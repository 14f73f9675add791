# SPDX-License-Identifier: Apache-2.0
"""Projects whose library calls ``Trainer.fit`` itself: the strategy divides the data that the Trainer is given."""

import copy
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support import Blobs, Classifier, blobs, federated_blobs, fresh, quiet_trainer, weights
from torch.utils.data import DataLoader, IterableDataset

import fl_lightning as fl
from fl_lightning.lightning.names import lightning_module

PARTITION = fl.data.Dirichlet(6, 1.0)


def strategy(partition=PARTITION, **options):
    return fl.FederatedStrategy(**{"clients_per_round": 3, "seed": 5, "partition": partition, **options})


class OwnLoaders(Classifier):
    def setup(self, stage):
        self.data = Blobs()

    def train_dataloader(self):
        return self.data.train_dataloader()

    def val_dataloader(self):
        return self.data.val_dataloader()


GIVEN = {
    "datamodule": lambda data: {"datamodule": data},
    "first argument": lambda data: {"train_dataloaders": data},
    "loaders": lambda data: {"train_dataloaders": data.train_dataloader(), "val_dataloaders": data.val_dataloader()},
    "list": lambda data: {"train_dataloaders": data.train_dataloader(), "val_dataloaders": [data.val_dataloader()]},
    "module": lambda data: {},
}


def fitted(give):
    """As neuralforecast and scvi-tools do behind the scenes: users pass Trainer arguments."""
    module = fresh(OwnLoaders if give == "module" else Classifier)
    trainer = quiet_trainer(strategy(), 3)
    trainer.fit(module, **GIVEN[give](Blobs()))
    return module, trainer


def wrapped(rounds=3, divide=lambda data: fl.FederatedDataModule(data, PARTITION, seed=5)):
    """The same fit with data that is wrapped by hand."""
    module, trainer = fresh(), quiet_trainer(strategy(None), rounds)
    trainer.fit(module, divide(Blobs()))
    return module, trainer


def assert_same(one, two):
    found, expected = one.strategy.last_evaluation, two.strategy.last_evaluation
    assert found.sizes.tolist() == expected.sizes.tolist()
    assert found.values.keys() == expected.values.keys()
    assert all(torch.equal(found.values[name], expected.values[name]) for name in expected.values)


@pytest.mark.parametrize("give", GIVEN)
def test_a_librarys_own_fit_is_federated_and_so_are_its_tests(give):
    (module, trainer), (expected, other) = fitted(give), wrapped()
    assert torch.equal(weights(module), weights(expected))
    for name in ("val_loss", "val_acc"):
        assert trainer.callback_metrics[name] == other.callback_metrics[name]
    assert_same(trainer, other)
    assert trainer.strategy.federated_data.num_clients == 6
    assert other.strategy.federated_data is None
    found = trainer.test(module, Blobs().test_dataloader(), verbose=False)
    assert found == other.test(expected, fl.FederatedDataModule(Blobs(), PARTITION, seed=5), verbose=False)
    assert_same(trainer, other)


def test_a_library_that_copies_its_arguments_and_counts_in_steps_is_federated():
    """neuralforecast deep-copies its models, and bounds and validates fits by steps."""
    given = {"strategy": strategy(), "max_steps": 20, "val_check_interval": 8, "check_val_every_n_epoch": None}
    copied = copy.deepcopy(given)
    quiet_trainer(max_epochs=None, **copied).fit(fresh(), datamodule=Blobs())
    assert given["strategy"].federated_data is None
    assert copied["strategy"].federated_data.num_clients == 6
    assert len(copied["strategy"].last_evaluation.sizes) == 6


class Looks(Callback):
    def on_train_start(self, trainer, pl_module):
        self.seen = trainer.datamodule


class Fails(Classifier):
    def on_train_start(self):
        raise RuntimeError("on purpose")


def test_the_trainer_has_its_own_data_before_and_after_also_where_the_fit_fails():
    data, looks, module = Blobs(batch_size=8), Looks(), fresh()
    trainer = quiet_trainer(strategy(), 1, callbacks=[looks])
    trainer.fit(module, datamodule=data)
    assert looks.seen is trainer.strategy.federated_data
    assert looks.seen.batch_size == 8
    assert trainer.datamodule is data
    assert data.trainer is trainer
    trainer = quiet_trainer(strategy(), 1)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(fresh(Fails), datamodule=data)
    assert trainer.datamodule is data
    plain = quiet_trainer("auto", 1)
    plain.fit(module, datamodule=data)
    assert plain.datamodule is data


def test_tests_without_a_fit_divide_a_data_module():
    module, federated = fresh(), strategy()
    quiet_trainer(federated).test(module, datamodule=Blobs(), verbose=False)
    assert len(federated.last_evaluation.sizes) == 6
    once = federated.federated_data
    trainer = quiet_trainer(federated)
    trainer.validate(module, datamodule=once.data, verbose=False)
    assert federated.federated_data is once, "the division is kept"
    assert trainer.datamodule is once.data


def test_loaders_without_known_training_data_are_evaluated_undivided():
    federated, data = strategy(), Blobs()
    with pytest.warns(UserWarning, match="Clients are defined by their training data"):
        found = quiet_trainer(federated).test(fresh(), data.test_dataloader(), verbose=False)
    assert federated.last_evaluation is None
    assert found == quiet_trainer("auto").test(fresh(), data.test_dataloader(), verbose=False)


def test_a_function_may_make_the_federated_data():
    divide = partial(fl.FederatedDataModule, partition=PARTITION, holdout=0.25, seed=3)
    module, trainer = fresh(), quiet_trainer(strategy(divide), 2)
    trainer.fit(module, Blobs().train_dataloader())
    expected, other = wrapped(2, lambda data: divide(data.train_dataloader()))
    assert torch.equal(weights(module), weights(expected))
    assert_same(trainer, other)


def test_the_command_line_takes_a_partition():
    parser = lightning_module("cli").LightningArgumentParser()
    parser.add_argument("--strategy", type=fl.FederatedStrategy)
    value = {"partition": {"class_path": "fl_lightning.data.IID", "init_args": {"num_clients": 3}}}
    value = {"class_path": "fl_lightning.FederatedStrategy", "init_args": value}
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # as jsonargparse calls it
    made = instantiate(parser.parse_object({"strategy": value})).strategy
    quiet_trainer(made, 1).fit(fresh(), datamodule=Blobs())
    assert made.federated_data.num_clients == 3


# ---- refusals


class Stream(IterableDataset):
    def __iter__(self):
        return iter(blobs(20))


DIVIDED = "partition must be left out of FederatedStrategy for data that is divided, found "
REFUSED = {
    "a stream": (DataLoader(Stream(), 4), None, PARTITION, "dataset of train_dataloaders must have a length"),
    "two": ([DataLoader(blobs(20))] * 2, None, PARTITION, "train_dataloaders must be one torch DataLoader, found list"),
    "a dict": (DataLoader(blobs(20)), {"a": DataLoader(blobs(20))}, PARTITION, "val_dataloaders must be .* found dict"),
    "divided data": (federated_blobs(), None, PARTITION, f"{DIVIDED}Fed"),
    "divided loaders": (federated_blobs().train_dataloader(), None, PARTITION, f"{DIVIDED}ClientLoaders"),
    "another function": (Blobs(), None, lambda data: Blobs(), "must return a FederatedDataModule, found Blobs"),
    "no partition": (DataLoader(blobs(20)), None, None, r"fl\.FederatedDataModule\(.*FederatedStrategy\(partition="),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused(name):
    train, val, partition, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        quiet_trainer(strategy(partition), 1).fit(fresh(), train, val)


def test_a_module_with_loaders_of_its_own_may_be_given_others():
    """As in Lightning: what ``fit`` is given comes before what the module has."""
    module = fresh(OwnLoaders)
    divide = partial(fl.FederatedDataModule, partition=fl.data.IID(2))
    trainer = quiet_trainer(strategy(divide, clients_per_round=2), 1)
    trainer.fit(module, DataLoader(blobs(40), 10))
    assert trainer.strategy.federated_data.client_sizes.tolist() == [20, 20]
    assert trainer.strategy.last_evaluation.sizes.sum() == 80
    assert isinstance(trainer.strategy.federated_data, L.LightningDataModule)
