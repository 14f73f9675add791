# SPDX-License-Identifier: Apache-2.0
"""A round against hand-written references."""

import re

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from plain_loop import federate, sgd
from support import Classifier, fresh, on_path, train, weights

import fl_lightning as fl

PATHS = {"lean": on_path(True), "full": on_path(False)}
both_paths = pytest.mark.parametrize("path", PATHS)


@both_paths
def test_fedavg_equals_a_plain_loop(path):
    module = train(**PATHS[path]).module
    assert torch.allclose(weights(module), weights(federate(fresh(), 3, sgd())), atol=1e-6, rtol=0)
    assert not torch.allclose(weights(module), weights(fresh()), atol=1e-2)


def test_local_epochs_momentum_and_dropout_equal_a_plain_loop():
    options = {"momentum": 0.9, "lr": 0.02, "dropout": 0.3}
    module = train(fresh(**options), local_epochs=2).module

    expected = federate(fresh(**options), 3, sgd(0.02, momentum=0.9), epochs=2)
    assert torch.allclose(weights(module), weights(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("options", "algorithm"),
    [
        ({"momentum": 0.9}, fl.algorithms.SCAFFOLD),
        ({"optimizer": "Adam", "lr": 0.01}, fl.algorithms.FedAvg),
        ({"dropout": 0.5}, fl.algorithms.FedProx),
        ({"norm": True, "log": True}, fl.algorithms.FedAvg),
    ],
)
def test_full_and_lean_paths_give_identical_weights(options, algorithm):
    lean, full = (train(fresh(**options), algorithm=algorithm(), **path).module for path in PATHS.values())
    assert torch.equal(weights(lean), weights(full))


class Returning(Classifier):
    """Returns the loss as something else."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        returned = {
            "float": loss.item(), "tuple": (loss, batch), "dict": {"preds": loss}, "number": {"loss": loss.item()},
            "None": None, "loss": {"loss": loss, "preds": batch},
        }  # fmt: skip
        return returned[self.how]


@both_paths
@pytest.mark.parametrize(
    ("how", "found"),
    [("float", "float"), ("tuple", "tuple"), ("dict", r"a dict with \['preds'\]"), ("number", "float as 'loss'")],
)
def test_what_is_no_loss_is_refused_on_both_paths(how, found, path):
    with pytest.raises(fl.ClientError) as caught:
        train(Returning(how), 1, **PATHS[path])
    if path == "lean":
        assert isinstance(caught.value.__cause__, MisconfigurationException)
        assert re.search(rf"training_step must return a tensor, .*, found {found} \(", str(caught.value))
    elif how != "number":  # Lightning takes it and then fails over it
        assert isinstance(caught.value.__cause__, MisconfigurationException)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`", "ignore:.* trained nothing:UserWarning")
@both_paths
def test_a_loss_in_a_dict_trains_and_none_skips(path):
    plain = train(rounds=1, **PATHS[path]).module
    for how, expected in (("loss", plain), ("None", fresh())):
        assert torch.equal(weights(train(fresh(Returning, how=how), 1, **PATHS[path]).module), weights(expected))


def test_same_seed_is_bit_identical_and_another_is_not():
    first = train(fresh(dropout=0.5)).module
    torch.manual_seed(123)  # whatever the outer generators are at
    second_module = fresh(dropout=0.5)
    torch.manual_seed(77)
    second = train(second_module).module
    other = train(fresh(dropout=0.5), seed=6).module
    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(other))


def test_local_steps_overrule_sizes():
    _, strategy, trainer = train(rounds=2, local_steps=7)
    assert (trainer.global_step, strategy.last_round.local_steps) == (2 * 7, 2 * 3 * 7)


def test_the_module_owns_its_parameters_after_the_fit():
    module = train().module
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert len(storages) == len(list(module.parameters()))
    assert isinstance(module, Classifier)
