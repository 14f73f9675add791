# SPDX-License-Identifier: Apache-2.0
"""``val_check_interval=n, check_val_every_n_epoch=None``, as libraries that count in steps set it (neuralforecast)."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from support import fit, weights

import fl_lightning as fl

EVERY = {"local_steps": 2, "val_check_interval": 3, "check_val_every_n_epoch": None}  # a round counts as 2 steps


class Validations(Callback):
    def __init__(self):
        self.epochs = []

    def on_validation_end(self, trainer, pl_module):
        self.epochs.append(trainer.current_epoch)


@pytest.mark.parametrize("executor", [None, fl.executors.Parallel(2)])
def test_a_round_is_validated_if_it_takes_an_nth_step(executor):
    seen = Validations()
    done = fit(rounds=6, callbacks=[seen], executor=executor, **EVERY)
    # 2, 4, 6, 8, 10 and 12 steps: the 3rd, the 6th, the 9th and the 12th lie in these rounds
    assert seen.epochs == [1, 2, 4, 5]
    assert done.strategy.last_evaluation.round == 6
    assert done.strategy.executor_fallback is None
    assert torch.equal(weights(done.module), weights(fit(rounds=6, local_steps=2, limit_val_batches=0).module))


def test_steps_alone_may_bound_a_fit():
    seen = Validations()
    done = fit(rounds=-1, max_steps=7, callbacks=[seen], **EVERY)
    assert done.trainer.global_step == 8
    assert seen.epochs == [1, 2]


def test_a_fit_resumes_with_the_same_validations(tmp_path):
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
    whole = fit(rounds=6, callbacks=[keep], enable_checkpointing=True, **EVERY)
    for epoch in range(5):
        seen = Validations()
        done = fit(rounds=6, callbacks=[seen], ckpt_path=tmp_path / f"epoch={epoch}.ckpt", **EVERY)
        assert seen.epochs == [later for later in (1, 2, 4, 5) if later > epoch]
        assert torch.equal(weights(done.module), weights(whole.module))


def test_early_stopping_sees_these_validations():
    stop = EarlyStopping("val_loss", patience=0, mode="max")
    done = fit(rounds=6, callbacks=[stop], **EVERY)
    assert done.trainer.current_epoch == 3
