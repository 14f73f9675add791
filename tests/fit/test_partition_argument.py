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


class Library:
    """Makes data and Trainer behind the scenes, as neuralforecast and scvi-tools do: users pass Trainer arguments."""

    def __init__(self, give, **trainer_kwargs):
        self.give, self.trainer_kwargs = give, trainer_kwargs

    def fit(self):
        self.model = fresh(OwnLoaders if self.give == "module" else Classifier)
        self.trainer = quiet_trainer(max_epochs=3, **self.trainer_kwargs)
        data = Blobs()
        if self.give == "datamodule":
            self.trainer.fit(self.model, datamodule=data)
        elif self.give == "first argument":
            self.trainer.fit(self.model, data)
        elif self.give == "loaders":
            self.trainer.fit(self.model, data.train_dataloader(), data.val_dataloader())
        elif self.give == "list":
            self.trainer.fit(self.model, data.train_dataloader(), [data.val_dataloader()])
        else:
            self.trainer.fit(self.model)
        return self


class OwnLoaders(Classifier):
    def setup(self, stage):
        self.data = Blobs()

    def train_dataloader(self):
        return self.data.train_dataloader()

    def val_dataloader(self):
        return self.data.val_dataloader()


def wrapped(**options):
    """The same fit with data that is wrapped by hand."""
    module = fresh()
    trainer = quiet_trainer(strategy(None, **options), 3)
    trainer.fit(module, fl.FederatedDataModule(Blobs(), PARTITION, seed=5))
    return module, trainer


@pytest.mark.parametrize("give", ["datamodule", "first argument", "loaders", "list", "module"])
def test_a_librarys_own_fit_is_federated(give):
    done, (module, trainer) = Library(give, strategy=strategy()).fit(), wrapped()
    assert torch.equal(weights(done.model), weights(module))
    for name in ("val_loss", "val_acc"):
        assert done.trainer.callback_metrics[name] == trainer.callback_metrics[name]
    found, expected = done.trainer.strategy.last_evaluation, trainer.strategy.last_evaluation
    assert found.values.keys() == expected.values.keys()
    assert all(torch.equal(found.values[name], expected.values[name]) for name in expected.values)
    assert done.trainer.strategy.federated_data.num_clients == 6
    assert trainer.strategy.federated_data is None


def test_a_library_that_copies_its_arguments_and_counts_in_steps_is_federated():
    """neuralforecast deep-copies its models, and bounds and validates fits by steps."""
    given = {"strategy": strategy(), "max_steps": 20, "val_check_interval": 8, "check_val_every_n_epoch": None}
    copied = copy.deepcopy(given)
    quiet_trainer(max_epochs=None, **copied).fit(fresh(), datamodule=Blobs())
    assert given["strategy"].federated_data is None
    assert copied["strategy"].federated_data.num_clients == 6
    assert len(copied["strategy"].last_evaluation.sizes) == 6


def test_the_trainer_has_its_own_data_before_and_after():
    class Looks(Callback):
        def on_train_start(self, trainer, pl_module):
            self.seen = trainer.datamodule

    data, looks, module = Blobs(batch_size=8), Looks(), fresh()
    trainer = quiet_trainer(strategy(), 1, callbacks=[looks])
    trainer.fit(module, datamodule=data)
    assert looks.seen is trainer.strategy.federated_data
    assert looks.seen.batch_size == 8
    assert trainer.datamodule is data
    assert data.trainer is trainer
    plain = quiet_trainer("auto", 1)
    plain.fit(module, datamodule=data)
    assert plain.datamodule is data


def test_a_failed_fit_gives_the_data_back():
    class Fails(Classifier):
        def on_train_start(self):
            raise RuntimeError("on purpose")

    data = Blobs()
    trainer = quiet_trainer(strategy(), 1)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(fresh(Fails), datamodule=data)
    assert trainer.datamodule is data


@pytest.mark.parametrize("give", ["datamodule", "loaders"])
def test_tests_after_a_fit_keep_its_clients(give):
    done, (module, trainer) = Library(give, strategy=strategy()).fit(), wrapped()
    data = Blobs()
    found = done.trainer.test(done.model, data.test_dataloader(), verbose=False)
    expected = trainer.test(module, fl.FederatedDataModule(Blobs(), PARTITION, seed=5), verbose=False)
    assert found == expected
    record, other = done.trainer.strategy.last_evaluation, trainer.strategy.last_evaluation
    assert record.sizes.tolist() == other.sizes.tolist()
    assert torch.equal(record.values["test_acc"], other.values["test_acc"])


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
    def divide(data):
        return fl.FederatedDataModule(data, PARTITION, holdout=0.25, seed=3)

    module, other = fresh(), fresh()
    trainer = quiet_trainer(strategy(divide), 2)
    trainer.fit(module, Blobs().train_dataloader())
    wrapped_trainer = quiet_trainer(strategy(None), 2)
    wrapped_trainer.fit(other, divide(Blobs().train_dataloader()))
    assert torch.equal(weights(module), weights(other))
    assert trainer.callback_metrics["val_acc"] == wrapped_trainer.callback_metrics["val_acc"]


def test_predictions_are_made_on_the_data_as_it_is():
    done = Library("datamodule", strategy=strategy()).fit()
    found = done.trainer.predict(done.model, Blobs().predict_dataloader())
    expected = quiet_trainer("auto").predict(done.model, Blobs().predict_dataloader())
    assert torch.equal(torch.cat(found), torch.cat(expected))


def test_a_fit_resumes(tmp_path):
    def run(rounds, ckpt_path=None):
        module, trainer = fresh(), quiet_trainer(strategy(), rounds)
        trainer.fit(module, Blobs().train_dataloader(), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return weights(module)

    run(2)
    assert torch.equal(run(4, tmp_path / "2.ckpt"), run(4))


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


def two_loaders():
    return [DataLoader(blobs(20)), DataLoader(blobs(20))]


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        (lambda: DataLoader(Stream(), 4), None, "train_dataloaders must have a map-style dataset"),
        (two_loaders, None, "train_dataloaders must be one torch DataLoader, found list"),
        (
            lambda: DataLoader(blobs(20)),
            lambda: {"a": DataLoader(blobs(20))},
            "val_dataloaders must be one .* found dict",
        ),
        (federated_blobs, None, r"partition must be left out of FederatedStrategy for data that is divided, found Fed"),
        (lambda: federated_blobs().train_dataloader(), None, "for data that is divided, found ClientLoaders"),
    ],
)
def test_what_cannot_be_divided_is_refused(train, val, message):
    trainer = quiet_trainer(strategy(), 1)
    with pytest.raises((TypeError, ValueError), match=message):
        trainer.fit(fresh(), train(), None if val is None else val())


def test_a_function_that_makes_something_else_is_refused():
    with pytest.raises(TypeError, match="partition must return a FederatedDataModule, found Blobs"):
        quiet_trainer(strategy(lambda data: Blobs()), 1).fit(fresh(), Blobs())


def test_undivided_data_is_refused_with_both_ways_out():
    with pytest.raises(TypeError, match=r"fl\.FederatedDataModule\(.*FederatedStrategy\(partition="):
        quiet_trainer(strategy(None), 1).fit(fresh(), Blobs().train_dataloader())


def test_a_module_with_loaders_of_its_own_may_be_given_others():
    """As in Lightning: what ``fit`` is given comes before what the module has."""
    module = fresh(OwnLoaders)
    divide = partial(fl.FederatedDataModule, partition=fl.data.IID(2))
    trainer = quiet_trainer(strategy(divide, clients_per_round=2), 1)
    trainer.fit(module, DataLoader(blobs(40), 10))
    assert trainer.strategy.federated_data.client_sizes.tolist() == [20, 20]
    assert trainer.strategy.last_evaluation.sizes.sum() == 80
    assert isinstance(trainer.strategy.federated_data, L.LightningDataModule)
