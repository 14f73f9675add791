# SPDX-License-Identifier: Apache-2.0
"""A round against hand-written references."""

import re

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import Classifier, federated_blobs, fit, fresh, on_path, weights

import fl_lightning as fl
from fl_lightning.core.seeding import derive_seed, isolated
from fl_lightning.data.cohort_samplers import UniformSampler

PATHS = {"lean": on_path(True), "full": on_path(False)}
both_paths = pytest.mark.parametrize("path", PATHS)


def plain_fedavg(module, rounds, epochs=1, make_optimizer=None, seed=5, cohort=3):
    """Federated averaging without any of the library's training code: only its data views and seeds."""
    data = federated_blobs()
    data.prepare_data()
    data.setup("fit")
    loaders = data.train_dataloader()
    make_optimizer = make_optimizer or (lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    for index in range(rounds):
        start = [p.detach().clone() for p in module.parameters()]
        total = [torch.zeros_like(p, dtype=torch.float64) for p in start]
        chosen = UniformSampler().select(index, cohort, loaders.sizes, derive_seed(seed, "sampler")).client_ids
        size = sum(int(loaders.sizes[c]) for c in chosen)
        for client in chosen:
            with torch.no_grad():
                for p, s in zip(module.parameters(), start, strict=True):
                    p.copy_(s)
            optimizer = make_optimizer(module)
            with isolated(derive_seed(seed, "client", index, client), torch.device("cpu")):
                for epoch in range(epochs):
                    shuffle = derive_seed(seed, "shuffle", index, client, epoch)
                    for (x, y), _ in loaders.batches(client, seed=shuffle):
                        optimizer.zero_grad()
                        F.cross_entropy(module(x), y).backward()
                        optimizer.step()
            with torch.no_grad():
                for t, p in zip(total, module.parameters(), strict=True):
                    t += p.double() * int(loaders.sizes[client]) / size
        with torch.no_grad():
            for p, t in zip(module.parameters(), total, strict=True):
                p.copy_(t)
    return module


@both_paths
def test_fedavg_equals_a_plain_loop(path):
    module = fit(**PATHS[path]).module
    assert torch.allclose(weights(module), weights(plain_fedavg(fresh(), 3)), atol=1e-6, rtol=0)
    assert not torch.allclose(weights(module), weights(fresh()), atol=1e-2)


def test_local_epochs_momentum_and_dropout_equal_a_plain_loop():
    options = {"momentum": 0.9, "lr": 0.02, "dropout": 0.3}
    module = fit(fresh(**options), local_epochs=2).module

    def sgd(m):
        return torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9)

    expected = plain_fedavg(fresh(**options), 3, epochs=2, make_optimizer=sgd)
    assert torch.allclose(weights(module), weights(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"optimizer": "Adam", "lr": 0.01}, {"dropout": 0.5}, {"norm": True}, {"log": True}],
)
@pytest.mark.parametrize("algorithm", [fl.algorithms.FedAvg, fl.algorithms.FedProx, fl.algorithms.SCAFFOLD])
def test_full_and_lean_paths_give_identical_weights(options, algorithm):
    if algorithm is fl.algorithms.SCAFFOLD and "optimizer" in options:
        pytest.skip("SCAFFOLD needs SGD")
    lean, full = (fit(fresh(**options), algorithm=algorithm(), **path).module for path in PATHS.values())
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
        fit(Returning(how), 1, **PATHS[path])
    if path == "lean":
        assert isinstance(caught.value.__cause__, MisconfigurationException)
        assert re.search(rf"training_step must return a tensor, .*, found {found} \(", str(caught.value))
    elif how != "number":  # Lightning takes it and then fails over it
        assert isinstance(caught.value.__cause__, MisconfigurationException)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`", "ignore:.* trained nothing:UserWarning")
@both_paths
def test_a_loss_in_a_dict_trains_and_none_skips(path):
    plain = fit(rounds=1, **PATHS[path]).module
    for how, expected in (("loss", plain), ("None", fresh())):
        assert torch.equal(weights(fit(fresh(Returning, how=how), 1, **PATHS[path]).module), weights(expected))


def test_same_seed_is_bit_identical_and_another_is_not():
    first = fit(fresh(dropout=0.5)).module
    torch.manual_seed(123)  # whatever the outer generators are at
    second_module = fresh(dropout=0.5)
    torch.manual_seed(77)
    second = fit(second_module).module
    other = fit(fresh(dropout=0.5), seed=6).module
    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(other))


def test_local_steps_overrule_sizes():
    _, strategy, trainer = fit(rounds=2, local_steps=7)
    assert (trainer.global_step, strategy.last_round.local_steps) == (2 * 7, 2 * 3 * 7)


def test_server_optimizer_with_unit_rate_equals_the_plain_step_and_momentum_does_not():
    plain = fit().module
    unit = fit(server_optimizer=lambda p: torch.optim.SGD(p, lr=1.0)).module
    momentum = fit(server_optimizer=lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9)).module
    assert torch.allclose(weights(plain), weights(unit), atol=1e-7)
    assert not torch.allclose(weights(plain), weights(momentum), atol=1e-3)


def test_the_module_owns_its_parameters_after_the_fit():
    module = fit().module
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert len(storages) == len(list(module.parameters()))
    assert isinstance(module, Classifier)
