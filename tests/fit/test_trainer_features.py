# SPDX-License-Identifier: Apache-2.0
"""The Trainer's own features in a federated fit: stopping, checkpoints, limits, repeated fits."""

from datetime import timedelta
from math import ceil

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer
from plain_loop import client_batches, federate, sgd
from support import Blobs, Classifier, federated_blobs, fit, fresh, quiet_trainer, weights
from watching import Watcher

import fl_lightning as fl

# ---- stopping and checkpoints


def test_validation_sees_the_aggregated_model_of_every_round():
    watcher = Watcher()
    fit(rounds=3, callbacks=[watcher])
    assert len(watcher.validated) == 3
    for rounds, seen in enumerate(watcher.validated, start=1):
        assert torch.allclose(seen, weights(federate(fresh(), rounds, sgd())), atol=1e-6, rtol=0)
    assert all(map(torch.equal, watcher.validated, watcher.ended))


@pytest.mark.parametrize("metric", ["val_loss", "fed/val_loss/mean", "fed/train_loss"])
def test_early_stopping(metric):
    stopping = EarlyStopping(metric, patience=1, min_delta=0.25, mode="min")
    values = []

    class Values(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            values.append(float(trainer.callback_metrics[metric]))

    module, _, trainer = fit(rounds=50, callbacks=[stopping, Values()])
    best, waited, expected = float("inf"), 0, None
    for rounds, value in enumerate(values, start=1):
        best, waited = (value, 0) if value < best - 0.25 else (best, waited + 1)
        expected = rounds if waited == 1 and expected is None else expected
    assert trainer.current_epoch == expected < 50
    assert torch.allclose(weights(module), weights(federate(fresh(), expected, sgd())), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("metric", "mode"), [("val_loss", "min"), ("fed/val_acc/worst_10", "max"), ("fed/val_acc/angle", "min")]
)
def test_the_best_checkpoint_reproduces_its_value(tmp_path, metric, mode):
    best = ModelCheckpoint(tmp_path, monitor=metric, mode=mode, filename="best-{epoch}", auto_insert_metric_name=False)
    seen = []

    class Values(Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append(float(trainer.callback_metrics[metric]))

    # A rate this large makes the metrics go up and down.
    module = fit(fresh(lr=1.5), 5, callbacks=[best, Values()], enable_checkpointing=True).module
    pick = min if mode == "min" else max
    assert float(best.best_model_score) == pytest.approx(pick(seen))
    assert best.best_model_path == str(tmp_path / f"best-{seen.index(pick(seen))}.ckpt")
    loaded = Classifier.load_from_checkpoint(best.best_model_path)
    (results,) = quiet_trainer(fl.FederatedStrategy()).validate(loaded, federated_blobs(), verbose=False)
    assert results[metric] == pytest.approx(pick(seen), rel=1e-6)
    assert seen.index(pick(seen)) == 4 or not torch.equal(weights(loaded), weights(module))


def test_max_steps_stop_at_the_end_of_a_round():
    module, strategy, trainer = fit(rounds=-1, max_steps=20)
    counted = []
    federate(fresh(), 5, lambda m, batches, index: counted.append(len(batches)))
    steps = strategy.fit_description.steps_per_round
    assert steps == ceil(sum(ceil(size / 10) for size in client_batches().sizes.tolist()) / 6)
    rounds = ceil(20 / steps)
    assert (trainer.current_epoch, trainer.global_step) == (rounds, rounds * steps)
    assert strategy.last_round.local_steps == sum(counted[: 3 * rounds])
    assert torch.allclose(weights(module), weights(federate(fresh(), rounds, sgd())), atol=1e-6, rtol=0)


@pytest.mark.parametrize("how", ["max_time", "Timer", "should_stop", "in a step"])
def test_a_stop_asked_for_within_a_round_waits_for_its_end(how, monkeypatch):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if how == "should_stop":
                trainer.should_stop = True
            elif batch.round == 1 and how != "in a step":  # all time is up
                (timer,) = (c for c in trainer.callbacks if isinstance(c, Timer))
                timer._duration = 0.0

        def on_validation_start(self, trainer, pl_module):
            validated.append((trainer.current_epoch, trainer.strategy.last_round.round))

    class StopsInAStep(Classifier):
        def training_step(self, batch, batch_idx):
            if how == "in a step" and self.trainer.current_epoch == 1:
                self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    validated = []
    # Before Timer, which looks at the clock in the same hook.
    callbacks = [Stop(), *([Timer(timedelta(hours=1))] if how == "Timer" else [])]
    options = {"max_time": timedelta(hours=1)} if how == "max_time" else {}
    module, _, trainer = fit(fresh(StopsInAStep), 5, callbacks=callbacks, **options)
    assert trainer.current_epoch == (1 if how == "should_stop" else 2)
    assert validated == [(index, index) for index in range(trainer.current_epoch)]  # after the server step, once
    expected = federate(fresh(), trainer.current_epoch, sgd())
    assert torch.allclose(weights(module), weights(expected), atol=1e-6, rtol=0)


# ---- limits and schedules of the trainer


@pytest.mark.parametrize(("limit", "kept"), [(2, lambda n: min(2, n)), (0.5, lambda n: max(1, n // 2))])
def test_limit_train_batches_counts_per_client(limit, kept):
    module, _, trainer = fit(limit_train_batches=limit)
    assert torch.allclose(weights(module), weights(federate(fresh(), 3, sgd(), limit=kept)), atol=1e-6, rtol=0)
    assert not torch.allclose(weights(module), weights(federate(fresh(), 3, sgd())), atol=1e-3)
    assert trainer.limit_train_batches == limit  # handed back


def test_fast_dev_run_is_one_round_of_one_batch_per_client():
    module, strategy, trainer = fit(rounds=9, fast_dev_run=True, clients_per_round=4)
    assert (trainer.current_epoch, trainer.global_step, strategy.last_round.local_steps) == (1, 1, 4)
    expected = federate(fresh(), 1, sgd(), limit=lambda n: 1, cohort=4)
    assert torch.allclose(weights(module), weights(expected), atol=1e-6, rtol=0)
    assert trainer.strategy.last_evaluation.sizes.max() <= 10


def test_sanity_check_leaves_no_trace():
    class Sanity(Callback):
        seen = None

        def on_sanity_check_end(self, trainer, pl_module):
            metrics = {n for n in trainer.callback_metrics if n.startswith("fed/")}
            self.seen = (trainer.strategy.last_evaluation, metrics, weights(pl_module))

    sanity = Sanity()
    module, _, trainer = fit(fresh(dropout=0.5), num_sanity_val_steps=2, callbacks=[sanity])
    without, _, other = fit(fresh(dropout=0.5))
    assert sanity.seen[:2] == (None, set())
    assert torch.equal(sanity.seen[2], weights(fresh(dropout=0.5)))
    assert torch.equal(weights(module), weights(without))
    ours, theirs = trainer.strategy.last_evaluation, other.strategy.last_evaluation
    assert all(torch.equal(ours.values[name], theirs.values[name]) for name in theirs.values)


def test_validation_every_second_round():
    watcher = Watcher()
    module = fit(rounds=4, check_val_every_n_epoch=2, callbacks=[watcher]).module
    assert len(watcher.validated) == 2
    assert torch.equal(watcher.validated[0], watcher.ended[1])
    assert torch.equal(weights(module), weights(fit(rounds=4).module))
    assert torch.equal(weights(module), weights(fit(rounds=4, limit_val_batches=0).module))


@pytest.mark.parametrize("algorithm", [fl.algorithms.FedLF, fl.algorithms.SCAFFOLD])
def test_reloading_the_data_every_round_changes_nothing(algorithm, caplog):
    loads = []

    class Counted(Blobs):
        def train_dataloader(self):
            loads.append(1)
            return super().train_dataloader()

    data = fl.FederatedDataModule(Counted(), fl.data.Dirichlet(6, 1.0), seed=0)
    kept = {"client_optimizer_state": "keep"}
    every = {"reload_dataloaders_every_n_epochs": 1}
    with caplog.at_level("INFO"):
        reloaded = fit(fresh(momentum=0.9), data=data, algorithm=algorithm(), **every, **kept).module
    assert sum("Memory beside the module" in message for message in caplog.messages) == 1
    plain = fit(fresh(momentum=0.9), algorithm=algorithm(), **kept).module
    assert torch.equal(weights(reloaded), weights(plain))


def test_options_that_change_no_number():
    options = {"detect_anomaly": True, "profiler": "simple", "deterministic": True, "inference_mode": False}
    try:
        module, _, trainer = fit(fresh(dropout=0.5), **options)
        assert torch.equal(weights(module), weights(fit(fresh(dropout=0.5)).module))
        assert len(trainer.profiler.recorded_durations["run_training_batch"]) == 9  # clients
    finally:
        torch.use_deterministic_algorithms(False)
