# SPDX-License-Identifier: Apache-2.0
"""What callbacks and libraries read of a trainer: its loaders, its data module, the batch, numbers in file names."""

import copy
import pickle

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, ThroughputMonitor
from support import Blobs, fit

import fl_lightning as fl
from fl_lightning.lightning.batches import ClientTask


class Named(Blobs):
    name = "blobs"
    category = "round"


def test_attributes_of_the_data_module_are_forwarded():
    data = fl.FederatedDataModule(Named(), fl.data.IID(2))
    assert (data.name, data.category) == ("blobs", "round")
    assert fl.FederatedDataModule(Blobs(), fl.data.IID(2)).name is L.LightningDataModule.name


def test_the_trainers_loaders_have_a_dataset_and_a_batch_size():
    class Reads(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            loader = trainer.train_dataloader
            self.train = (len(loader.dataset), loader.batch_size)

        def on_validation_epoch_start(self, trainer, pl_module):
            loader = trainer.val_dataloaders
            self.val = (len(loader.dataset), loader.batch_size)

    reads = Reads()
    fit(rounds=1, callbacks=[reads])
    assert reads.train == (240, 10)
    assert reads.val == (80, 10)


def unpacks(batch):
    x, _ = batch
    return len(x)


@pytest.mark.parametrize(
    ("read", "use"),
    [
        (lambda batch: batch[0], r"batch\[0\]"),
        (lambda batch: batch["image"], r"batch\['image'\]"),
        (lambda batch: batch.image, r"batch\.image"),
        (unpacks, r"batch\[0\]"),
    ],
)
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_callbacks_that_read_the_batch_are_told_where_it_is(read, use, hook):
    callback = Callback()
    place = 2 if hook == "on_train_batch_start" else 3
    setattr(callback, hook, lambda *args: read(args[place]))
    message = rf"a ClientTask with .*found {use}: read batches in the module's own hooks"
    with pytest.raises((TypeError, AttributeError), match=message):
        fit(rounds=1, callbacks=[callback])


@pytest.mark.filterwarnings("ignore:When using the `ThroughputMonitor`")
def test_throughput_is_measured_in_samples_of_clients():
    def samples(batch):
        return batch.num_samples if isinstance(batch, ClientTask) else len(batch[0])

    fit(rounds=1, callbacks=[ThroughputMonitor(samples, window_size=2)], limit_val_batches=0)
    with pytest.raises(TypeError, match="callbacks run on the server"):
        fit(rounds=1, callbacks=[ThroughputMonitor(lambda batch: len(batch[0]), window_size=2)])


def test_tasks_are_copied_and_pickled():
    task = ClientTask(3, 0, 1, 20, 2)
    assert copy.deepcopy(task) == pickle.loads(pickle.dumps(task)) == task
    assert not hasattr(task, "image")
    assert len(task) == 2
