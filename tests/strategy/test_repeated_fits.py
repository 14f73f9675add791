# SPDX-License-Identifier: Apache-2.0
"""Fits after fits: with another trainer, with the same one, and without federation."""

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from plain_loop import evaluate
from support import Blobs, federated_blobs, fresh, quiet_trainer, weights

import fl_lightning as fl
from fl_lightning.checkpoint import AtomicCheckpointIO
from fl_lightning.loop import FederatedEpochLoop
from fl_lightning.state import FederatedState


def strategy(**options):
    return fl.FederatedStrategy(**{"clients_per_round": 3, "seed": 5, **options})


@pytest.mark.parametrize("algorithm", [fl.algorithms.FedAvg, fl.algorithms.SCAFFOLD, fl.algorithms.FedLF])
def test_a_second_trainer_starts_afresh(algorithm):
    federated = strategy(algorithm=algorithm(), client_optimizer_state="keep")
    module = fresh(momentum=0.9)
    quiet_trainer(federated, 2).fit(module, federated_blobs())
    first = weights(module)
    # The same strategy on untrained weights: nothing of the first fit may be left in the rule.
    again = fresh(momentum=0.9)
    quiet_trainer(federated, 2).fit(again, federated_blobs())
    assert torch.equal(weights(again), first)
    quiet_trainer(federated, 2).fit(module, federated_blobs())
    assert not torch.equal(weights(module), first)
    assert "log" not in vars(module)


@pytest.mark.parametrize("algorithm", [fl.algorithms.FedAvg, fl.algorithms.SCAFFOLD, fl.algorithms.FedLF])
def test_the_same_trainer_goes_on_with_more_rounds(algorithm):
    federated = strategy(algorithm=algorithm(), server_optimizer=lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5))
    module = fresh(lr=0.05)
    trainer = quiet_trainer(federated, 2, limit_train_batches=4)
    trainer.fit(module, federated_blobs())
    trainer.validate(module, federated_blobs(), verbose=False)
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, federated_blobs())
    assert trainer.current_epoch == 5
    callbacks = [c for c in trainer.callbacks if isinstance(c, FederatedState)]
    assert len(callbacks) == 1
    assert type(trainer.fit_loop.epoch_loop) is FederatedEpochLoop
    assert trainer.limit_train_batches == 4

    whole = fresh(lr=0.05)
    options = {"server_optimizer": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5)}
    uninterrupted = quiet_trainer(strategy(algorithm=algorithm(), **options), 5, limit_train_batches=4)
    uninterrupted.fit(whole, federated_blobs())
    assert torch.equal(weights(module), weights(whole))
    assert trainer.global_step == uninterrupted.global_step


def test_the_module_trains_without_federation_afterwards():
    module = fresh()
    quiet_trainer(strategy(), 2).fit(module, federated_blobs())
    loss = evaluate(module)[1][0]
    trainer = quiet_trainer("auto", 3)
    trainer.fit(module, Blobs())
    assert trainer.global_step == 3 * 24
    assert evaluate(module)[1][0] < loss


def test_every_trainer_has_its_own_precision_and_plugins(tmp_path):
    federated = strategy()
    for precision, dtype in (("64-true", torch.float64), ("bf16-true", torch.bfloat16), (None, torch.float32)):
        module = fresh()
        quiet_trainer(federated, 1, precision=precision).fit(module, federated_blobs())
        assert {p.dtype for p in module.parameters()} == {dtype}
    own = TorchCheckpointIO()
    assert quiet_trainer(federated, plugins=[own]).strategy.checkpoint_io is own
    assert type(quiet_trainer(federated).strategy.checkpoint_io) is AtomicCheckpointIO
    trainer = quiet_trainer(federated, 1, plugins=[AsyncCheckpointIO()])
    assert type(trainer.strategy.checkpoint_io.checkpoint_io) is AtomicCheckpointIO
    module = fresh()
    trainer.fit(module, federated_blobs())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    trainer.strategy.checkpoint_io.teardown()  # waits for the write
    restored = type(module).load_from_checkpoint(tmp_path / "one.ckpt")
    assert torch.equal(weights(restored), weights(module))
