# SPDX-License-Identifier: Apache-2.0
"""What the Trainer may not be asked for in a federated fit, each with a sentence; Lightning's private attributes."""

import copy
import inspect
import re
from datetime import timedelta
from functools import partial
from inspect import signature

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
)
from plain_loop import evaluate
from support import Blobs, Classifier, federated_blobs, fit, fresh, quiet_trainer, weights

import fl_lightning as fl
from fl_lightning.lightning import epoch_loop as loop
from fl_lightning.lightning import names as lightning_names
from fl_lightning.lightning.names import pl

TAKES_TIMES = "timedelta" in str(signature(pl.Trainer).parameters["val_check_interval"].annotation)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"overfit_batches": 2}, "overfit_batches is not supported: use limit_train_batches, which counts per client"),
        ({"val_check_interval": 0.5}, "val_check_interval must be 1.0: .*check_val_every_n_epoch.*found 0.5"),
        ({"val_check_interval": 1}, "val_check_interval must be 1.0: .*check_val_every_n_epoch.*found 1$"),
        pytest.param(
            {"val_check_interval": timedelta(seconds=9)},
            "val_check_interval must be 1.0: .*found 'an interval of time'",
            marks=pytest.mark.skipif(not TAKES_TIMES, reason="Lightning 2.6 brought intervals of time"),
        ),
    ],
)
def test_trainer_options_without_meaning_are_refused(option, message):
    module = fresh()
    with pytest.raises(ValueError, match=message) as refusal:
        fit(module, 1, **option)
    assert "\n" not in str(refusal.value)
    assert torch.equal(weights(module), weights(fresh()))


class Thaws(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.net[0])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 3:
            self.unfreeze_and_add_param_group(module.net[0], optimizer)


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (Thaws(), r"freeze in the module's __init__, setup or on_fit_start, and thaw for a fit with"),
        (BackboneFinetuning(3), r"freeze in the module's __init__, setup or on_fit_start, and thaw for a fit with"),
        (ModelPruning("l1_unstructured", amount=0.5), r"prune the trained module after the fit"),
    ],
)
def test_callbacks_that_change_what_is_trained_are_refused_before_the_fit(callback, remedy):
    module = fresh()
    with pytest.raises(ValueError, match=rf"^{type(callback).__name__} changes in mid-fit which .*: {remedy}"):
        fit(module, 1, callbacks=[callback])
    assert torch.equal(weights(module), weights(fresh()))
    # Evaluation changes nothing.
    quiet_trainer(fl.FederatedStrategy(), callbacks=[Thaws()]).validate(module, federated_blobs(), verbose=False)


class FreezesLate(Classifier):
    """Some parameters of the optimizer stop being trained after it was made."""

    hook = "on_train_start"

    def freeze(self, hook):
        if hook == self.hook:
            self.net[0].weight.data = self.net[0].weight.data.clone()
            self.net[0].requires_grad_(False)

    def setup(self, stage):
        self.freeze("setup")

    def on_fit_start(self):
        self.freeze("on_fit_start")

    def on_train_start(self):
        self.freeze("on_train_start")


@pytest.mark.parametrize(
    ("algorithm", "executor"),
    [
        (fl.algorithms.SCAFFOLD, fl.executors.Sequential),
        (fl.algorithms.SCAFFOLD, partial(fl.executors.Parallel, workers=2)),
        (fl.algorithms.FedLF, fl.executors.Sequential),
    ],
)
def test_freezing_when_the_fit_starts_works(algorithm, executor):
    ends = {}
    for hook in ("setup", "on_fit_start"):
        module = fresh(type("Freezes", (FreezesLate,), {"hook": hook}))
        strategy = fl.FederatedStrategy(algorithm(), clients_per_round=3, executor=executor())
        trainer = quiet_trainer(strategy, 1, num_sanity_val_steps=2)
        trainer.fit(module, federated_blobs())
        assert strategy.executor_fallback is None
        assert torch.equal(module.net[0].weight, fresh().net[0].weight)
        assert not torch.equal(module.net[2].weight, fresh().net[2].weight)
        ends[hook] = weights(module)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, federated_blobs())
    assert torch.equal(ends["setup"], ends["on_fit_start"])


def test_freezing_later_gets_a_remedy():
    with pytest.raises(ValueError, match=r"changes in \['net.0.bias', .*: freeze, .* __init__, .*or on_fit_start"):
        fit(fresh(FreezesLate), 1)


class Iterates(Classifier):
    def training_step(self, dataloader_iter):
        return None


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
@pytest.mark.parametrize(
    ("module", "callback", "message"),
    [
        (Classifier, LearningRateFinder, "LearningRateFinder tries out the batches of one loader, .*tune on undivided"),
        (Classifier, BatchSizeFinder, "BatchSizeFinder tries out the batches of one loader, .*tune on undivided data"),
        (Iterates, None, r"Iterates\.training_step must take a batch, found dataloader_iter"),
    ],
)
def test_what_works_on_one_loader_is_refused(module, callback, message):
    with pytest.raises(ValueError, match=message):
        fit(fresh(module), 1, callbacks=[] if callback is None else [callback()])


def test_a_refusal_leaves_the_trainers_limits_alone():
    strategy = fl.FederatedStrategy(clients_per_round=3)
    quiet_trainer(strategy, 1, limit_train_batches=3).fit(fresh(), federated_blobs())
    refused = quiet_trainer(strategy, 1, overfit_batches=2)
    assert refused.limit_train_batches == 2
    with pytest.raises(ValueError, match="overfit_batches"):
        refused.fit(fresh(), federated_blobs())
    assert refused.limit_train_batches == 2


@pytest.mark.parametrize("source", ["datamodule", "loader"])
def test_plain_training_data_gets_one_sentence(source):
    data = Blobs() if source == "datamodule" else Blobs().train_dataloader()
    module = fresh()
    with pytest.raises(TypeError, match=r"wrap the data, data = fl\.FederatedDataModule\(my_datamodule, ") as refusal:
        fit(module, 1, data=data)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).endswith("found a DataLoader")
    assert torch.equal(weights(module), weights(fresh()))


def test_federated_data_needs_the_strategy():
    with pytest.raises(TypeError, match=r"FederatedStrategy"):
        quiet_trainer("auto", 1).fit(fresh(), federated_blobs())


def test_strategy_by_name():
    module = fresh()
    trainer = quiet_trainer("federated", 2)
    trainer.fit(module, federated_blobs())
    assert type(trainer.strategy) is fl.FederatedStrategy
    assert type(trainer.strategy.algorithm) is fl.algorithms.FedAvg
    expected = fresh()
    quiet_trainer(fl.FederatedStrategy(), 2).fit(expected, federated_blobs())
    assert torch.equal(weights(module), weights(expected))
    assert evaluate(module)[1][0] < evaluate(fresh())[1][0]


# ---- the contract with Lightning


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, names[0]) for path, names in lightning_names.CONTRACT.items()] + [("fit_loop.epoch_loop", "_results")],
)
def test_a_lightning_that_moved_an_attribute_is_refused(monkeypatch, path, name):
    changed = copy.copy(lightning_names.CONTRACT)
    changed[path] = (*changed[path], f"{name}_of_another_release")
    monkeypatch.setattr(lightning_names, "CONTRACT", changed)
    with pytest.raises(RuntimeError) as refusal:
        fit(rounds=1)
    sentence = str(refusal.value)
    assert f"{pl.__version__} is not supported: trainer.{path} lacks ['{name}_of_another_release']" in sentence
    assert "lightning 2.5.3 to 2.6" in sentence


def test_a_missing_attribute_is_found():
    trainer = quiet_trainer(fl.FederatedStrategy())
    lightning_names.check_contract(trainer)
    del trainer._logger_connector._current_fx
    with pytest.raises(RuntimeError, match=r"trainer\._logger_connector lacks \['_current_fx'\]"):
        lightning_names.check_contract(trainer)


def test_every_private_attribute_in_use_is_in_the_contract():
    base = quiet_trainer("auto").fit_loop.epoch_loop
    own = set(re.findall(r"self\.(_[a-z]\w+)", inspect.getsource(loop.FederatedEpochLoop)))
    inherited = {name for name in own if hasattr(base, name)} | {"_batches_that_stepped"}
    assert inherited <= set(lightning_names.CONTRACT["fit_loop.epoch_loop"])
    of_connector = set(re.findall(r"connector\.(_[a-z]\w+)", inspect.getsource(loop)))
    assert of_connector
    assert of_connector <= set(lightning_names.CONTRACT["_logger_connector"])
