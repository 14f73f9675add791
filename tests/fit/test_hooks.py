# SPDX-License-Identifier: Apache-2.0
"""Which hooks run when: callbacks live on the server, the module and its data on the client."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from plain_loop import assert_trained_to, client_batches, evaluate, federate, sgd
from support import Blobs, Classifier, blobs, fit, fresh, on_path, train, weights
from torch.utils.data import DataLoader, Dataset

import fl_lightning as fl
from fl_lightning.lightning.batches import ClientTask

# ---- hooks of the module and of callbacks


class Diary(Classifier):
    """Notes the batches that the hooks are given."""

    def __init__(self, **options):
        super().__init__(**options)
        self.started, self.ended, self.outputs = [], [], []

    def on_train_batch_start(self, batch, batch_idx):
        self.started.append((batch_idx, batch[1].tolist()))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ended.append((batch_idx, batch[1].tolist()))
        self.outputs.append(float(outputs["loss"]))


def test_module_hooks_see_every_local_batch_in_order():
    module, expected = train(fresh(Diary), 2).module, []
    federate(fresh(), 2, lambda m, batches, index: expected.extend((i, y.tolist()) for i, (_, y) in enumerate(batches)))
    assert module.started == module.ended == expected
    assert len(module.outputs) == len(expected)
    assert torch.allclose(weights(module), weights(federate(fresh(), 2, sgd())), atol=1e-6, rtol=0)


def test_callback_hooks_see_one_client_and_the_global_model():
    class Server(Callback):
        def __init__(self):
            self.tasks, self.before, self.after, self.losses, self.at_start = [], [], [], [], []

        def on_train_epoch_start(self, trainer, pl_module):
            self.at_start.append(weights(pl_module))

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.tasks.append((batch, batch_idx))
            self.before.append(weights(pl_module))

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert (batch, batch_idx) == self.tasks[-1]
            self.after.append(weights(pl_module))
            self.losses.append(float(outputs["loss"]))

    server = Server()

    class Bar(TQDMProgressBar):
        def on_train_batch_end(self, *_):
            """Counts clients, and may."""

    words = "of Server are called"
    with pytest.warns(UserWarning, match=f"on_train_batch_end {words} once per client and round, not") as said:
        train(rounds=2, callbacks=[Bar(), server], enable_progress_bar=True)
    assert sum(words in str(warning.message) for warning in said) == 1
    assert len(server.tasks) == len(server.after) == 2 * 3
    loaders = client_batches()
    for place, (task, index) in enumerate(server.tasks):
        assert isinstance(task, ClientTask)
        assert (task.round, task.index, index) == (place // 3, place % 3, place % 3)
        assert task.num_samples == loaders.sizes[task.client_id]
        assert len(task) == task.num_batches == loaders.num_batches(task.client_id)
        assert torch.equal(server.before[place], server.at_start[place // 3])
        assert torch.equal(server.after[place], server.at_start[place // 3])
    assert not torch.equal(server.at_start[0], server.at_start[1])
    # The loss of a client is the mean over the samples that it trained on.
    diary = train(fresh(Diary), 2).module
    steps = list(zip(diary.started, diary.outputs, strict=True))
    for (task, _), found in zip(server.tasks, server.losses, strict=True):
        mine, steps = steps[: len(task)], steps[len(task) :]
        expected = sum(loss * len(labels) for (_, labels), loss in mine) / task.num_samples
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_module_may_stop_a_clients_training_with_minus_one():
    class Stops(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 1 else None

    module, strategy, _ = train(fresh(Stops), 2)
    assert strategy.last_round.local_steps == 2 * 3
    expected = federate(fresh(Stops), 2, sgd(), limit=lambda n: 1)
    assert torch.allclose(weights(module), weights(expected), atol=1e-6, rtol=0)


# ---- hooks of the data


class Transfers:
    """Each hook changes the inputs in a way that the order of the hooks shows."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 1.0, batch[1]]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return super().transfer_batch_to_device([batch[0] * 2.0, batch[1]], device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] - 3.0, batch[1]]


class TransferringBlobs(Transfers, Blobs):
    pass


class TransferringClassifier(Transfers, Classifier):
    pass


def moved(x):
    return (x + 1.0) * 2.0 - 3.0


@pytest.mark.filterwarnings("ignore:You have overridden `.*batch.*`")
@pytest.mark.parametrize(("where", "lean"), [("data", True), ("module", True), ("module", False)])
def test_transfer_hooks_are_called_also_where_losses_are_asked_for(where, lean):
    kind, plain = (Classifier, TransferringBlobs) if where == "data" else (TransferringClassifier, Blobs)
    data = fl.FederatedDataModule(plain(), fl.data.Dirichlet(6, 1.0), seed=0)
    module = train(fresh(kind), data=data, **on_path(lean)).module
    step = sgd()
    expected = federate(fresh(), 3, lambda m, batches, index: step(m, [(moved(x), y) for x, y in batches], index))
    assert_trained_to(module, expected)
    record = train(fresh(kind), 1, data=data, algorithm=fl.algorithms.FedLF(), **on_path(lean)).strategy.last_round
    untrained, loaders = fresh(), client_batches()
    for client, loss in zip(record.client_ids, record.losses.tolist(), strict=True):
        x, y = (torch.cat(c) for c in zip(*(b for b, _ in loaders.batches(client, seed=None)), strict=True))
        with torch.no_grad():
            assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(untrained(moved(x)), y)), rel=1e-5)


class Samples(Dataset):
    """The blobs behind a dataset that knows nothing of tensors."""

    def __init__(self, samples, seed):
        self.source = blobs(samples, seed)
        self.targets = self.source.tensors[1]

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        x, y = self.source[index]
        return {"x": x, "y": int(y)}


def collate(samples):
    return torch.stack([s["x"] for s in samples]), torch.tensor([s["y"] for s in samples])


class Collated(L.LightningDataModule):
    def __init__(self, workers):
        super().__init__()
        self.workers = workers

    def train_dataloader(self):
        return DataLoader(Samples(240, 0), 10, shuffle=True, collate_fn=collate, num_workers=self.workers)

    def val_dataloader(self):
        return DataLoader(Samples(80, 1), 10, collate_fn=collate, num_workers=self.workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_collate_functions_and_workers_are_kept(workers):
    data = fl.FederatedDataModule(Collated(workers), fl.data.Dirichlet(6, 1.0), seed=0)
    rounds = 1 if workers else 3
    module, _, trainer = fit(rounds=rounds, data=data)
    assert torch.allclose(weights(module), weights(federate(fresh(), rounds, sgd())), atol=1e-6, rtol=0)
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(evaluate(module)[1][0], rel=1e-4)
