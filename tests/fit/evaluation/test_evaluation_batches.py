# SPDX-License-Identifier: Apache-2.0
"""Evaluation batches know their client however Lightning fetches them, and hooks see what the loaders gave."""

import lightning as L
import lightning.pytorch.loops.evaluation_loop as evaluation_loop
import pytest
import torch
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from plain_loop import client_batches
from support import Blobs, Classifier, federated_blobs, fresh, quiet_trainer

import fl_lightning as fl
from fl_lightning.fit.loaders import EvaluationLoader


class Several(Classifier):
    """Evaluates on one loader or several."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return super().predict_step(batch, batch_idx)


def evaluate(module, data, stage="val", **options):
    strategy = fl.FederatedStrategy()
    trainer = quiet_trainer(strategy, **options)
    (trainer.validate if stage == "val" else trainer.test)(module, data, verbose=False)
    return strategy.last_evaluation, dict(trainer.callback_metrics)


def assert_same(found, expected):
    (record, metrics), (other, others) = found, expected
    assert (record.client_ids, record.sizes.tolist()) == (other.client_ids, other.sizes.tolist())
    assert record.values.keys() == other.values.keys()
    for name, values in other.values.items():
        assert torch.equal(record.values[name], values), name
    assert metrics == others


@pytest.mark.parametrize("batches", [1, 2, 50])
@pytest.mark.parametrize("stage", ["val", "test"])
def test_batches_may_be_fetched_ahead(batches, stage, monkeypatch):
    expected = evaluate(fresh(), federated_blobs(), stage)
    fetched, counted = [], []

    class Ahead(_PrefetchDataFetcher):
        def __next__(self):
            counted.append(len(self.batches))
            fetched.append(super().__next__())
            return fetched[-1]

    def no_length(loader):
        raise TypeError

    monkeypatch.setattr(evaluation_loop, "_select_data_fetcher", lambda *args: Ahead(batches))
    monkeypatch.setattr(EvaluationLoader, "__len__", no_length)
    assert_same(evaluate(fresh(), federated_blobs(), stage), expected)
    assert counted[0] == min(batches, len(fetched))  # they were ahead


class Seeing(Several):
    """Keeps what each of its hooks is given."""

    def __init__(self):
        super().__init__()
        self.seen = Seen()

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return self.seen.add("before", batch)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return self.seen.add("transfer", batch)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return self.seen.add("after", batch)

    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.seen.add("start", batch)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(self.seen.add("step", batch), batch_idx)

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.add("end", batch)


class Seen(L.Callback):
    def __init__(self):
        self.batches = {}

    def add(self, name, batch):
        self.batches.setdefault(name, []).append(batch)
        return batch

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.add("callback start", batch)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.add("callback end", batch)


def test_hooks_and_callbacks_get_the_batch_of_the_loader(monkeypatch):
    given, module = [], fresh(Seeing)
    loaders = client_batches("val")
    batches = type(loaders).batches

    def noted(self, *args, **kwargs):
        for batch, size in batches(self, *args, **kwargs):
            given.append(batch)
            yield batch, size

    monkeypatch.setattr(type(loaders), "batches", noted)
    strategy = fl.FederatedStrategy()
    trainer = quiet_trainer(strategy, callbacks=[module.seen])
    trainer.validate(module, loaders, verbose=False)
    assert len(module.seen.batches) == 8
    assert strategy.last_evaluation.sizes.sum() == 80
    for name, seen in module.seen.batches.items():
        assert [id(batch) for batch in seen] == [id(batch) for batch in given], name
    for loop in (trainer.validate_loop, trainer.fit_loop.epoch_loop.val_loop):
        assert "_evaluation_step" not in vars(loop)


@pytest.mark.parametrize("first", [True, False])
def test_clients_beside_a_loader_of_undivided_data(first):
    expected, _ = evaluate(fresh(), client_batches("val"))
    plain = Blobs().test_dataloader()
    loaders = [client_batches("val"), plain] if first else [plain, client_batches("val")]
    found, metrics = evaluate(fresh(Several), loaders)
    assert (found.client_ids, found.sizes.tolist()) == (expected.client_ids, expected.sizes.tolist())
    assert len(found.values) == len(expected.values)
    for name, values in expected.values.items():
        torch.testing.assert_close(found.values[f"{name}/dataloader_idx_{0 if first else 1}"], values)
    assert {"val_acc/dataloader_idx_0", "val_acc/dataloader_idx_1"} <= metrics.keys()


class Fetches(Classifier):
    def validation_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        super().validation_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")  # Lightning calls it experimental
def test_a_step_that_fetches_batches_itself():
    with pytest.raises(ValueError, match=r"Fetches\.validation_step must take a batch, found dataloader_iter"):
        evaluate(fresh(Fetches), federated_blobs())
    assert evaluate(fresh(Fetches), Blobs().val_dataloader())[0] is None


def test_prediction_on_divided_data_gets_plain_batches():
    trainer = quiet_trainer(fl.FederatedStrategy())
    loaders = client_batches("val")
    found = torch.cat(trainer.predict(fresh(Several), loaders))
    batches = [b for client in range(len(loaders)) for b, _ in loaders.batches(client, seed=None)]
    with torch.no_grad():
        assert torch.equal(found, fresh().eval()(torch.cat([x for x, _ in batches])).argmax(1))
