# SPDX-License-Identifier: Apache-2.0
"""Validation, test and prediction with the global model: pooled and per-client values against evaluation by hand."""

import pytest
import torch
import torch.nn.functional as F
from plain_loop import client_batches, evaluate
from support import Blobs, Classifier, federated_blobs, fit, fresh, quiet_trainer

import fl_lightning as fl


def test_fairness_numbers_of_the_clients_are_logged():
    module, data, strategy = fresh(), federated_blobs(), fl.FederatedStrategy()
    (results,) = quiet_trainer(strategy).test(module, data, verbose=False)
    clients, _ = evaluate(module, "test")
    accuracies = torch.tensor([a for _, a, _ in clients.values()], dtype=torch.float64)
    sizes = torch.tensor([float(n) for *_, n in clients.values()], dtype=torch.float64)
    expected = {
        "mean": accuracies.mean(),
        "weighted_mean": (accuracies * sizes).sum() / sizes.sum(),
        "std": accuracies.std(correction=0),
        "angle": torch.acos(accuracies.mean() / accuracies.square().mean().sqrt()),
        "worst_5": accuracies.min(),
        "best_10": accuracies.max(),
    }
    for name, value in expected.items():
        assert results[f"fed/test_acc/{name}"] == pytest.approx(float(value), rel=1e-5), name
    assert "fed/test_loss/angle" not in results  # smaller is better: no angle
    # The pooled value weighs clients by their samples.
    assert results["fed/test_acc/weighted_mean"] == pytest.approx(results["test_acc"], rel=1e-5)


@pytest.mark.parametrize("source", ["datamodule", "loader"])
@pytest.mark.parametrize("limit", [1.0, 3])
def test_plain_data_is_evaluated_as_ever(source, limit):
    module, strategy, plain = fresh(), fl.FederatedStrategy(), Blobs()
    data = plain if source == "datamodule" else plain.val_dataloader()
    trainer = quiet_trainer(strategy, limit_val_batches=limit)
    (results,) = trainer.validate(module, data, verbose=False)
    batches = list(plain.val_dataloader())[: None if limit == 1.0 else limit]
    x, y = (torch.cat(column) for column in zip(*batches, strict=True))
    with torch.no_grad():
        assert results["val_loss"] == pytest.approx(float(F.cross_entropy(module.eval()(x), y)), rel=1e-5)
    assert strategy.last_evaluation is None
    assert not [name for name in results if name.startswith("fed/")]


def test_federated_training_with_plain_validation_data():
    module, data = fresh(), federated_blobs()
    data.prepare_data()
    data.setup("fit")
    trainer = quiet_trainer(fl.FederatedStrategy(), 2, limit_val_batches=2, limit_train_batches=1)
    trainer.fit(module, data.train_dataloader(), Blobs().val_dataloader())
    x, y = (torch.cat(column) for column in zip(*list(Blobs().val_dataloader())[:2], strict=True))
    with torch.no_grad():
        expected = float(F.cross_entropy(module.eval()(x), y))
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(expected, rel=1e-5)
    assert trainer.strategy.last_round.local_steps == 2 * 6  # one batch per client


def test_prediction_uses_the_trained_model_on_undivided_data():
    module, data = fresh(), federated_blobs()
    trainer = quiet_trainer(fl.FederatedStrategy(), 2)
    trainer.fit(module, data)
    predicted = torch.cat(trainer.predict(module, data))
    (x,) = (torch.cat(column) for column in zip(*Blobs().predict_dataloader(), strict=True))
    with torch.no_grad():
        assert torch.equal(predicted, module.eval()(x).argmax(1))
    assert not torch.equal(predicted, fresh().eval()(x).argmax(1))


@pytest.mark.parametrize("limit", [2, 0.5])
@pytest.mark.parametrize("stage", ["val", "test"])
def test_evaluation_limits_count_per_client(stage, limit):
    module, data, strategy = fresh(), federated_blobs(batch_size=3), fl.FederatedStrategy()
    trainer = quiet_trainer(strategy, **{f"limit_{stage}_batches": limit})
    run = trainer.validate if stage == "val" else trainer.test
    run(module, data, verbose=False)
    loaders = client_batches(stage, federated_blobs(batch_size=3))
    expected = {}
    for client in range(len(loaders)):
        sizes = [size for _, size in loaders.batches(client, seed=None)]
        if sizes:
            expected[client] = sum(sizes[: limit if limit == 2 else max(1, len(sizes) // 2)])
    record = strategy.last_evaluation
    assert dict(zip(record.client_ids, record.sizes.tolist(), strict=True)) == expected
    assert sum(expected.values()) < 80
    assert getattr(trainer, f"limit_{stage}_batches") == limit  # handed back


def test_a_fairness_metric_that_nobody_logs_is_warned_of_once(recwarn):
    def warned(metric, **trainer):
        recwarn.clear()
        strategy = fl.FederatedStrategy(fairness_metric=metric, clients_per_round=3)
        quiet_trainer(strategy, 3, **trainer).fit(fresh(), federated_blobs())
        return [str(w.message) for w in recwarn.list if "fairness_metric" in str(w.message)]

    assert warned("typo", num_sanity_val_steps=2) == [
        "fairness_metric must be a metric that validation logs per client, found 'typo': the progress bar shows no "
        "angle; there are 'val_loss', 'val_acc'"
    ]
    assert not warned("val_acc")
    assert not warned("val_loss")
    assert not warned("typo", limit_val_batches=0)


class Drawing(Classifier):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("drawn", torch.rand(()), batch_size=len(batch[0]))


def test_random_numbers_of_an_evaluation_follow_the_seed_the_round_and_the_client():
    def drawn(seed, rounds):
        return fit(fresh(Drawing), rounds, seed=seed).strategy.last_evaluation.values["drawn"].tolist()

    one = drawn(0, 1)
    assert len(set(one)) == len(one)
    assert one == drawn(0, 1)
    assert not {*one} & {*drawn(1, 1), *drawn(0, 2)}
