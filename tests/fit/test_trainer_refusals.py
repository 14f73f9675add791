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
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from support import Blobs, Classifier, federated_blobs, fit, fresh, quiet_trainer, weights

import fl_lightning as fl
from fl_lightning.lightning import epoch_loop as loop
from fl_lightning.lightning import loop_parts
from fl_lightning.lightning.names import pl

# Lightning 2.5 has no such callbacks.
EMAWeightAveraging = getattr(callbacks, "EMAWeightAveraging", Callback)
WeightAveraging = getattr(callbacks, "WeightAveraging", Callback)
TAKES_TIMES = "timedelta" in str(signature(pl.Trainer).parameters["val_check_interval"].annotation)


class Thaws(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.net[0])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 3:
            self.unfreeze_and_add_param_group(module.net[0], optimizer)


class AfterManySteps(WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None):
        return step_idx is not None and step_idx >= 500


class Iterates(Classifier):
    def training_step(self, dataloader_iter):
        return None


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


MID_FIT = r" changes in mid-fit which .*: "
FREEZE = r"freeze in the module's __init__, setup or on_fit_start, and thaw for a fit with"
TUNES = " tries out the batches of one loader, .*tune on undivided data"
WHOLE = " must average whole rounds.*: "
WRAP = r"wrap the data, data = fl\.FederatedDataModule\(my_datamodule, .*found a DataLoader$"
INTERVAL = "val_check_interval must be 1.0: .*check_val_every_n_epoch.*found "
REFUSED = {
    "overfit_batches": (
        {"overfit_batches": 2}, "overfit_batches is not supported: use limit_train_batches, which counts per client",
    ),
    "a share": ({"val_check_interval": 0.5}, f"{INTERVAL}0.5$"),
    "a count": ({"val_check_interval": 1}, f"{INTERVAL}1$"),
    "an interval": (
        {"val_check_interval": 4},
        "or check_val_every_n_epoch=None to validate after the round in which every",
    ),
    "times": ({"val_check_interval": timedelta(seconds=9)}, f"{INTERVAL}'an interval of time'"),
    "thaws": ({"callbacks": [Thaws()]}, f"^Thaws{MID_FIT}{FREEZE}"),
    "backbone": ({"callbacks": [BackboneFinetuning(3)]}, f"^BackboneFinetuning{MID_FIT}{FREEZE}"),
    "pruning": (
        {"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]},
        f"^ModelPruning{MID_FIT}prune the trained module after the fit",
    ),
    "freezes late": (
        {"module": FreezesLate}, r"changes in \['net.0.bias', .*: freeze, .* __init__, .*or on_fit_start",
    ),
    "rate finder": ({"callbacks": [LearningRateFinder()]}, f"LearningRateFinder{TUNES}"),
    "size finder": ({"callbacks": [BatchSizeFinder()]}, f"BatchSizeFinder{TUNES}"),
    "iterator": ({"module": Iterates}, r"Iterates\.training_step must take a batch, found dataloader_iter"),
    "plain data": ({"data": Blobs()}, WRAP),
    "plain loader": ({"data": Blobs().train_dataloader()}, WRAP),
    "averaged BatchNorm": (
        {"callbacks": [StochasticWeightAveraging(0.1)], "module": partial(Classifier, norm=True)},
        "StochasticWeightAveraging passes over the data once more to renew BatchNorm",
    ),
    "moving average of steps": (
        {"callbacks": [EMAWeightAveraging()]}, f"^EMAWeightAveraging{WHOLE}pass update_every_n_steps=0 and ",
    ),
    "average of steps": (
        {"callbacks": [WeightAveraging()]}, rf"^WeightAveraging{WHOLE}use a subclass whose should_update\(self, ",
    ),
    "average after many steps": (
        {"callbacks": [AfterManySteps()]}, r"^AfterManySteps must average .* found should_update\(step_idx=500\)",
    ),
}  # fmt: skip
if not TAKES_TIMES:  # before Lightning 2.6
    del REFUSED["times"]
if WeightAveraging is Callback:  # likewise
    REFUSED = {name: case for name, case in REFUSED.items() if "average of" not in name and "many steps" not in name}


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_refused_in_a_sentence_before_the_fit(name):
    options, words = REFUSED[name]
    kind = options.get("module", Classifier)
    module = fresh(kind)
    with pytest.raises((TypeError, ValueError), match=words) as refusal:
        fit(module, 1, **{key: value for key, value in options.items() if key != "module"})
    assert "\n" not in str(refusal.value)
    assert torch.equal(weights(module), weights(fresh(kind)))


def test_evaluation_changes_nothing_and_may_have_such_callbacks():
    quiet_trainer(fl.FederatedStrategy(), callbacks=[Thaws()]).validate(fresh(), federated_blobs(), verbose=False)


@pytest.mark.parametrize(
    ("algorithm", "executor"),
    [(fl.algorithms.SCAFFOLD, None), (fl.algorithms.SCAFFOLD, fl.executors.Parallel(2)), (fl.algorithms.FedLF, None)],
)
def test_freezing_when_the_fit_starts_works(algorithm, executor):
    ends = {}
    for hook in ("setup", "on_fit_start"):
        module = fresh(type("Freezes", (FreezesLate,), {"hook": hook}))
        _, strategy, trainer = fit(module, 1, algorithm=algorithm(), executor=executor, num_sanity_val_steps=2)
        assert strategy.executor_fallback is None
        assert torch.equal(module.net[0].weight, fresh().net[0].weight)
        assert not torch.equal(module.net[2].weight, fresh().net[2].weight)
        ends[hook] = weights(module)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, federated_blobs())
    assert torch.equal(ends["setup"], ends["on_fit_start"])


def test_a_refusal_leaves_the_trainers_limits_alone():
    refused = quiet_trainer(fit(rounds=1, limit_train_batches=3).strategy, 1, overfit_batches=2)
    with pytest.raises(ValueError, match="overfit_batches"):
        refused.fit(fresh(), federated_blobs())
    assert refused.limit_train_batches == 2


def test_federated_data_needs_the_strategy():
    with pytest.raises(TypeError, match=r"FederatedStrategy"):
        quiet_trainer("auto", 1).fit(fresh(), federated_blobs())


def test_strategy_by_name():
    module, trainer = fresh(), quiet_trainer("federated", 2)
    trainer.fit(module, federated_blobs())
    assert type(trainer.strategy) is fl.FederatedStrategy
    assert type(trainer.strategy.algorithm) is fl.algorithms.FedAvg
    expected = fresh()
    quiet_trainer(fl.FederatedStrategy(), 2).fit(expected, federated_blobs())
    assert torch.equal(weights(module), weights(expected))


# ---- the contract with Lightning


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, names[0]) for path, names in loop_parts.CONTRACT.items()] + [("fit_loop.epoch_loop", "_results")],
)
def test_a_lightning_that_moved_an_attribute_is_refused(monkeypatch, path, name):
    changed = copy.copy(loop_parts.CONTRACT)
    changed[path] = (*changed[path], f"{name}_of_another_release")
    monkeypatch.setattr(loop_parts, "CONTRACT", changed)
    with pytest.raises(RuntimeError) as refusal:
        fit(rounds=1)
    sentence = str(refusal.value)
    assert f"{pl.__version__} is not supported: trainer.{path} lacks ['{name}_of_another_release']" in sentence
    assert "lightning 2.5.3 to 2.6" in sentence


def test_a_missing_attribute_is_found():
    trainer = quiet_trainer(fl.FederatedStrategy())
    loop_parts.check_contract(trainer)
    del trainer._logger_connector._current_fx
    with pytest.raises(RuntimeError, match=r"trainer\._logger_connector lacks \['_current_fx'\]"):
        loop_parts.check_contract(trainer)


def test_every_private_attribute_in_use_is_in_the_contract():
    base = quiet_trainer("auto").fit_loop.epoch_loop
    own = set(re.findall(r"self\.(_[a-z]\w+)", inspect.getsource(loop.FederatedEpochLoop)))
    inherited = {name for name in own if hasattr(base, name)} | {"_batches_that_stepped"}
    assert inherited <= set(loop_parts.CONTRACT["fit_loop.epoch_loop"])
    of_connector = set(re.findall(r"connector\.(_[a-z]\w+)", inspect.getsource(loop)))
    assert of_connector
    assert of_connector <= set(loop_parts.CONTRACT["_logger_connector"])
