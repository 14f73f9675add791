# SPDX-License-Identifier: Apache-2.0
"""Fits after fits: with another trainer, with the same one, and without federation."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from resuming import differences
from support import federated_blobs, fit, fresh, quiet_trainer, training_only, weights

import fl_lightning as fl
from fl_lightning.fit.state_callback import FederatedState
from fl_lightning.lightning.checkpoint_io import AtomicCheckpointIO
from fl_lightning.lightning.epoch_loop import FederatedEpochLoop


def strategy(**options):
    return fl.FederatedStrategy(**{"clients_per_round": 3, "seed": 5, **options})


class Saving(Callback):
    """Saves a checkpoint at the end of a fit."""

    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("algorithm", [fl.algorithms.Ditto, fl.algorithms.SCAFFOLD, fl.algorithms.FedLF])
def test_a_second_trainer_starts_afresh(algorithm):
    federated = strategy(algorithm=algorithm(), client_optimizer_state="keep")
    module = fresh(momentum=0.9)
    training_only(federated, 2).fit(module, federated_blobs())
    first, kept = weights(module), copy.deepcopy(federated._fits.states())
    # The same strategy on untrained weights: nothing of the first fit may be left in the rule.
    again = fresh(momentum=0.9)
    training_only(federated, 2).fit(again, federated_blobs())
    assert torch.equal(weights(again), first)
    assert not differences(federated._fits.states(), kept)
    training_only(federated, 2).fit(module, federated_blobs())
    assert not torch.equal(weights(module), first)
    assert "log" not in vars(module)


@pytest.mark.parametrize(
    "algorithm", [fl.algorithms.FedAvg, fl.algorithms.SCAFFOLD, fl.algorithms.FedLF, fl.algorithms.AFL]
)
def test_the_same_trainer_goes_on_with_more_rounds(algorithm):
    options = {"server_optimizer": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5), "client_optimizer_state": "keep"}
    federated = strategy(algorithm=algorithm(), **options)
    module = fresh(lr=0.05, momentum=0.5)
    trainer = quiet_trainer(federated, 2, limit_train_batches=4)
    trainer.fit(module, federated_blobs())
    trainer.validate(module, federated_blobs(), verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, federated_blobs())
    assert trainer.current_epoch == 3
    callbacks = [c for c in trainer.callbacks if isinstance(c, FederatedState)]
    assert len(callbacks) == 1
    assert type(trainer.fit_loop.epoch_loop) is FederatedEpochLoop
    assert trainer.limit_train_batches == 4

    whole = fresh(lr=0.05, momentum=0.5)
    uninterrupted = quiet_trainer(strategy(algorithm=algorithm(), **options), 3, limit_train_batches=4)
    uninterrupted.fit(whole, federated_blobs())
    assert torch.equal(weights(module), weights(whole))
    assert trainer.global_step == uninterrupted.global_step


def test_the_same_trainer_goes_on_from_other_weights():
    """Weights that the module is given after a fit are those that the next rounds begin with."""
    module, other = fresh(), fresh(seed=1)
    trainer = quiet_trainer(strategy(algorithm=fl.algorithms.AFL(0.1)), 2)
    trainer.fit(module, federated_blobs())
    module.load_state_dict(other.state_dict())
    begun = []

    class Begins(Callback):
        def on_train_start(self, trainer, module):
            begun.append(weights(module).clone())

    trainer.callbacks.append(Begins())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, federated_blobs())
    assert torch.equal(*begun, weights(other))


def test_an_interrupted_fit_leaves_the_parameters_that_it_trains():
    """Those to evaluate, AFL's mean over rounds, are what a fit ends with."""
    seen = []

    class Interrupts(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append(weights(module).clone())
            if trainer.current_epoch == 2:
                raise RuntimeError("out of time")

    module = fresh()
    with pytest.raises(RuntimeError, match="out of time"):
        quiet_trainer(strategy(algorithm=fl.algorithms.AFL(0.1)), 4, callbacks=[Interrupts()]).fit(
            module, federated_blobs()
        )
    assert torch.equal(weights(module), seen[-1])


class TrainedClients(Callback):
    """Which round trained how many clients; breaks off one validation if asked to."""

    def __init__(self, breaks):
        self.rounds, self.breaks = [], breaks

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.rounds.append(trainer.current_epoch)

    def on_validation_end(self, trainer, module):
        if self.breaks and trainer.current_epoch == 1:
            self.breaks = False
            raise RuntimeError("the machine caught fire")


@pytest.mark.filterwarnings('ignore:.fit.ckpt_path="last". is set, but there is no last')
@pytest.mark.filterwarnings("ignore:.*was called without a model")
@pytest.mark.parametrize("how", ["at the epoch's end", "after validation", "what an exception left"])
def test_the_same_trainer_goes_on_from_a_checkpoint(tmp_path, how):
    breaks = how == "what an exception left"
    saver = OnExceptionCheckpoint(tmp_path) if breaks else ModelCheckpoint(
        tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=how == "at the epoch's end"
    )  # fmt: skip
    seen, module, method = TrainedClients(breaks), fresh(), fl.algorithms.SCAFFOLD
    trainer = quiet_trainer(strategy(algorithm=method()), 4, callbacks=[seen, saver], enable_checkpointing=True)
    if breaks:
        with pytest.raises(RuntimeError, match="caught fire"):
            trainer.fit(module, federated_blobs())
        trainer.fit(module, federated_blobs())
        assert seen.rounds == [index for index in range(4) for _ in range(3)]
    else:
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, federated_blobs())
        trainer.fit_loop.max_epochs = 4
        seen.rounds.clear()
        trainer.fit(module, federated_blobs(), ckpt_path=tmp_path / "epoch=0.ckpt")
        assert seen.rounds == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert torch.equal(weights(module), weights(fit(rounds=4, algorithm=method()).module))


def test_a_round_without_a_server_step_is_an_error(monkeypatch):
    monkeypatch.setattr(FederatedEpochLoop, "done", property(lambda loop: loop.trainer.current_epoch == 1))
    with pytest.raises(RuntimeError, match=r"round 1 must train its clients before it ends, .*with a new Trainer"):
        quiet_trainer(strategy(), 2, limit_val_batches=0).fit(fresh(), federated_blobs())


def test_every_trainer_has_its_own_precision_and_plugins(tmp_path):
    federated = strategy()
    for precision, dtype in (("64-true", torch.float64), ("bf16-true", torch.bfloat16), (None, torch.float32)):
        module = fresh()
        quiet_trainer(federated, 1, precision=precision).fit(module, federated_blobs())
        assert {p.dtype for p in module.parameters()} == {dtype}
    own = TorchCheckpointIO()
    assert quiet_trainer(federated, plugins=[own]).strategy.checkpoint_io is own
    assert type(quiet_trainer(federated).strategy.checkpoint_io) is AtomicCheckpointIO
    trainer = quiet_trainer(federated, 1, plugins=[AsyncCheckpointIO()], callbacks=[Saving(tmp_path / "one.ckpt")])
    assert type(trainer.strategy.checkpoint_io.checkpoint_io) is AtomicCheckpointIO
    module = fresh()
    trainer.fit(module, federated_blobs())  # waits for the write in the end
    restored = type(module).load_from_checkpoint(tmp_path / "one.ckpt")
    assert torch.equal(weights(restored), weights(module))
