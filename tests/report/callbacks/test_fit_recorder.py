# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import lightning as L
import pytest
import torch
from support import Blobs, Classifier, blobs, federated_blobs, fresh, quiet_trainer
from watching import Records

import fl_lightning as fl
from fl_lightning.report import record_from_json, record_to_json
from fl_lightning.report.callbacks import FitRecorder


def strategy(**options):
    return fl.FederatedStrategy(options.pop("algorithm", None), clients_per_round=3, seed=1, **options)


def timeless(record):
    """A record without what differs between two runs of the same fit."""
    seconds = dict.fromkeys(("training_seconds", "server_seconds", "evaluation_seconds"), (0.0,) * len(record.rounds))
    return replace(record, rounds=replace(record.rounds, **seconds), memory={})


def test_a_record_says_what_the_strategy_said():
    recorder, watch = FitRecorder(), Records()
    chosen = strategy(algorithm=fl.algorithms.FedLF(max_history=2))
    trainer = quiet_trainer(chosen, 4, callbacks=[recorder, watch])
    module, data = fresh(lr=0.05), federated_blobs()
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    record = recorder.record
    assert (record.method, record.seed, record.learning_rate) == ("FedLF", 1, 0.05)
    assert (record.status, record.planned_rounds) == ("finished", 4)
    assert record.client_sizes == tuple(data.client_sizes.tolist())
    assert record.class_counts == tuple(map(tuple, data.label_counts().tolist()))
    assert record.arguments["FedLF"]["max_history"] == 2
    assert record.settings["clients_per_round"] == 3
    assert record.configuration["hyperparameters"]["lr"] == 0.05
    assert record.configuration["trained parameters"] == sum(p.numel() for p in module.parameters())
    assert record.memory == chosen.memory_plan
    assert record.versions["torch"].startswith(f"{torch.__version__} (")
    assert record.rounds.round == (0, 1, 2, 3)
    assert all(seconds > 0 for seconds in (*record.rounds.training_seconds, *record.rounds.server_seconds))
    assert all(seconds > 0 for seconds in record.rounds.evaluation_seconds)
    assert record.rounds.conflicts == tuple(one.conflicts for one in watch.rounds)
    series = next(s for s in record.metrics if s.metric == "val_acc")
    assert series.rounds == (1, 2, 3, 4)
    for name in ("mean", "worst_10", "angle"):
        assert series.summaries[name] == tuple(float(one.summary("val_acc")[name]) for one in watch.evaluations)
    assert record.last_values().values["test_acc"] == tuple(chosen.last_evaluation.values["test_acc"].tolist())
    assert record.client_names == data.client_names
    assert record_from_json(record_to_json(record)) == record


def test_a_resumed_fit_has_the_rounds_of_both_runs(tmp_path):
    def run(rounds, ckpt_path=None):
        recorder = FitRecorder()
        trainer = quiet_trainer(strategy(), rounds, callbacks=[recorder])
        trainer.fit(fresh(), federated_blobs(), ckpt_path=ckpt_path)
        return recorder.record, trainer

    whole, _ = run(5)
    _, trainer = run(2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed, _ = run(5, tmp_path / "two.ckpt")
    assert resumed.rounds.round == (0, 1, 2, 3, 4)
    assert timeless(resumed) == replace(timeless(whole), configuration=resumed.configuration)
    assert torch.load(tmp_path / "two.ckpt", weights_only=True)["callbacks"]["FitRecorder"]["record"]


class Decays(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def test_a_second_fit_of_the_trainer_goes_on_and_a_fresh_one_begins_anew():
    recorder = FitRecorder(method="plain averaging")
    trainer, data = quiet_trainer(strategy(), 2, callbacks=[recorder]), federated_blobs()
    module = fresh(Decays)
    trainer.fit(module, data)
    assert recorder.record.learning_rate == 0.1  # of the first round
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data)
    assert recorder.record.rounds.round == (0, 1, 2)
    assert recorder.record.method == "plain averaging"
    quiet_trainer(strategy(), 1, callbacks=[recorder]).fit(fresh(), federated_blobs())
    assert recorder.record.rounds.round == (0,)


@pytest.mark.filterwarnings("ignore:client .* is left out of round", "ignore:round 1 had no usable report")
def test_drop_outs_and_errors_are_told_apart():
    class Breaks(Classifier):
        def training_step(self, batch, batch_idx):
            if self.trainer.current_epoch == 1:
                raise RuntimeError("no disk")
            return super().training_step(batch, batch_idx)

    recorder, sampler = FitRecorder(), fl.data.AvailabilitySampler(1.0, drop_out=0.3)
    chosen = strategy(on_client_error="drop", sampler=sampler)
    quiet_trainer(chosen, 4, callbacks=[recorder]).fit(Breaks(), federated_blobs())
    assert recorder.record.rounds.clients[1] == 0
    reasons = {entry.reason: entry for entry in recorder.record.absences}
    assert (reasons["RuntimeError: no disk"].first_round, reasons["RuntimeError: no disk"].last_round) == (1, 1)
    assert sum(entry.count for entry in reasons.values()) == 12 - sum(recorder.record.rounds.clients)
    assert set(reasons) == {"RuntimeError: no disk", "dropped out"}


def test_an_interrupted_fit_says_so():
    class Stops(L.Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 1:
                raise ValueError("enough")

    recorder = FitRecorder()
    with pytest.raises(ValueError, match="enough"):
        quiet_trainer(strategy(), 3, callbacks=[recorder, Stops()]).fit(fresh(), federated_blobs())
    assert recorder.record.status == "interrupted"
    assert recorder.record.rounds.round == (0, 1)


def test_data_without_classes_and_without_validation():
    class Reads(torch.utils.data.Dataset):
        reads = 0

        def __len__(self):
            return 40

        def __getitem__(self, index):
            Reads.reads += 1
            return blobs(40)[index]

    recorder = FitRecorder()
    data = fl.FederatedDataModule(Reads(), fl.data.IID(4))
    quiet_trainer(strategy(), 1, callbacks=[recorder]).fit(Classifier(), data)
    assert recorder.record.class_counts == ()  # nobody reads all samples for a picture
    assert Reads.reads == 30
    assert recorder.record.evaluations == ()
    assert recorder.record.rounds.evaluation_seconds == (0.0,)


def test_classes_have_the_datasets_names():
    dataset = blobs(40)
    dataset.classes = ["cat", "dog", "horse", "mouse"]
    names, counts = fl.FederatedDataModule(dataset, fl.data.IID(4)).known_label_counts()
    assert names == ("cat", "dog", "horse", "mouse")
    assert counts.sum() == 40
    assert fl.FederatedDataModule(Blobs(), fl.data.IID(4)).known_label_counts()[0] == ("0", "1", "2", "3")


def test_a_record_needs_a_fit():
    with pytest.raises(ValueError, match="record needs a fit that has begun, found none"):
        _ = FitRecorder().record
    assert FitRecorder().state_dict() == {}
