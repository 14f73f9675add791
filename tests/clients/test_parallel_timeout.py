# SPDX-License-Identifier: Apache-2.0
"""Workers that stop or wait for ever: their clients have failed, and the fit goes on."""

import os
import signal
import time

import lightning as L
import pytest
from support import Blobs, Classifier, blobs, fresh, train
from torch.utils.data import DataLoader, Dataset
from worker_processes import FORKS

import fl_lightning as fl

pytestmark = FORKS

LIMIT = 3  # seconds; an honest client here takes some milliseconds


def in_workers(module=None, rounds=2, timeout=LIMIT, **options):
    executor = fl.executors.Parallel(workers=2, timeout=timeout)
    return train(module, rounds, **{"clients_per_round": 5, "executor": executor, **options})


class Stops(Classifier):
    """Its process is stopped in round 1, where one of the batches begins in a certain way."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and len(batch[1]) == 10 and 2 in batch[1][:2] and self.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)


def test_the_client_of_a_stopped_worker_is_left_out_and_the_others_are_trained():
    with pytest.warns(UserWarning, match=r"client \d+ is left out of round 1: TimeoutError: it trained for more than "):
        _, strategy, trainer = in_workers(fresh(Stops), 3, on_client_error="drop")
    assert trainer.current_epoch == 3
    assert strategy.executor_fallback is None
    assert len(strategy.last_round.client_ids) == 5  # round 2


class Blocking(Dataset):
    """Waits for ever at one sample, as for a file that never comes."""

    def __init__(self):
        self.data = blobs(240)

    def __len__(self):
        return 240

    def __getitem__(self, index):
        if index == 17:
            time.sleep(1000)
        return self.data[index]


@pytest.mark.parametrize("loaders", [0, 1])
def test_a_dataset_that_blocks_is_an_error_with_the_clients_name(loaders):
    class Data(Blobs):
        def train_dataloader(self):
            return DataLoader(Blocking(), batch_size=10, num_workers=loaders)

    data = fl.FederatedDataModule(Data(), fl.data.IID(6), seed=0)
    data.setup("fit")
    owner = next(c for c in range(6) if 17 in data.train_dataloader().indices(c))
    begun = time.monotonic()
    message = rf"client {owner} in round 0: TimeoutError: it trained for more than timeout={LIMIT} s, and its worker"
    with pytest.raises(fl.ClientError, match=message):
        in_workers(data=data, clients_per_round=6)
    assert time.monotonic() - begun < 60


def test_time_that_callbacks_take_is_not_the_clients():
    class Thinking(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            time.sleep(0.7)

    Thinking.on_train_batch_end.__module__ = "lightning.pytorch.callbacks"  # as a progress bar's
    _, strategy, trainer = in_workers(rounds=1, timeout=2.5, callbacks=[Thinking()])
    assert trainer.current_epoch == 1
    assert strategy.executor_fallback is None
