# SPDX-License-Identifier: Apache-2.0
"""Training on a GPU ends where training on the CPU does. FL_LIGHTNING_TEST_DEVICE=cpu tries the tests themselves."""

import os

import pytest
import torch
from resuming import ALGORITHMS
from support import federated_blobs, fit, fresh, quiet_trainer, weights

import fl_lightning as fl

DEVICE = os.environ.get("FL_LIGHTNING_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")


def fit_on(device, rule, **network):
    """A module in float64 trained for three rounds, so that rounding cannot turn a decision of the rule."""
    options = {"accelerator": device, "devices": 1, "precision": "64-true", "clients_per_round": 4, "seed": 0}
    return fit(fresh(**network), algorithm=rule(), **options)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_fit_agrees_with_that_on_the_cpu(name):
    network = {"norm": name == "FedBN"}
    there, there_strategy, _ = fit_on(DEVICE, ALGORITHMS[name], **network)
    here, here_strategy, _ = fit_on("cpu", ALGORITHMS[name], **network)
    torch.testing.assert_close(weights(there).cpu(), weights(here), rtol=1e-6, atol=1e-9)
    assert there_strategy.last_round.client_ids == here_strategy.last_round.client_ids


def test_updates_that_are_added_up_have_the_bits_of_a_matrix():
    options = {"accelerator": DEVICE, "devices": 1, "clients_per_round": 1.0}
    one, two = (fit(count_conflicts=counts, **options).module for counts in (False, True))
    assert torch.equal(weights(one), weights(two))


def test_the_fit_runs_where_it_was_asked_to():
    _, strategy, trainer = fit_on(DEVICE, fl.algorithms.FedLF)
    assert trainer.strategy.root_device.type == DEVICE
    assert strategy.root_device.type == DEVICE


def test_a_checkpoint_from_the_gpu_resumes_on_the_cpu(tmp_path):
    path = tmp_path / "after.ckpt"
    module, _, trainer = fit_on(DEVICE, fl.algorithms.SCAFFOLD)
    trainer.save_checkpoint(path)
    strategy = fl.FederatedStrategy(fl.algorithms.SCAFFOLD(), clients_per_round=4, local_epochs=1, seed=0)
    again = quiet_trainer(strategy, max_epochs=3, precision="64-true")
    resumed = fresh(seed=1)
    again.fit(resumed, federated_blobs(), ckpt_path=path)
    torch.testing.assert_close(weights(resumed), weights(module).cpu())
