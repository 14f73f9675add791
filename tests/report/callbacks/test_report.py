# SPDX-License-Identifier: Apache-2.0
import itertools
import os
import re

import lightning as L
import pytest
from support import federated_blobs, fresh, quiet_trainer

import fl_lightning as fl
from fl_lightning.report.callbacks import Report, fit_recorder

pytest.importorskip("plotly")


def strategy():
    return fl.FederatedStrategy(clients_per_round=3, seed=1)


def rounds_in(path):
    return int(re.search(r"· (\d+) rounds?", path.read_text(encoding="utf-8"))[1])


class Watch(L.Callback):
    """Notes after each round how many of them the file has; comes after the report."""

    def __init__(self, path, stop_after=None):
        self.path, self.seen, self.stop_after = path, [], stop_after

    def on_train_epoch_end(self, trainer, module):
        self.seen.append((rounds_in(self.path), "the fit runs, " in self.path.read_text(encoding="utf-8")))
        if trainer.current_epoch + 1 == self.stop_after:
            raise ValueError("enough")


def test_the_file_is_there_from_the_first_round_on_and_whole_at_the_end(tmp_path):
    path = tmp_path / "folder" / "report.html"
    callback, watch = Report(path, every=0.0), Watch(path)
    module, data = fresh(), federated_blobs()
    trainer = quiet_trainer(strategy(), 3, callbacks=[callback, watch])
    trainer.fit(module, data)
    assert watch.seen[0] == (1, True)
    assert rounds_in(path) == 3
    assert "the fit runs" not in path.read_text(encoding="utf-8")
    assert "test_acc" not in path.read_text(encoding="utf-8")
    trainer.test(module, data, verbose=False)
    assert "test_acc" in path.read_text(encoding="utf-8")
    assert os.listdir(path.parent) == ["report.html"]


def test_writing_is_bounded(tmp_path, monkeypatch):
    """A clock in which a round takes 1 s and writing 2 s."""
    ticks, written = itertools.count(), []
    now = [0.0]
    monkeypatch.setattr(fit_recorder.time, "perf_counter", lambda: now[0] + next(ticks) * 1e-6)

    def slow(records, path):
        now[0] += 2.0
        written.append(len(records[0].rounds))

    monkeypatch.setattr(fit_recorder, "write_report", slow)

    class Clock(L.Callback):
        def on_train_epoch_start(self, trainer, module):
            now[0] += 1.0

    callback = Report(tmp_path / "report.html")
    quiet_trainer(strategy(), 100, callbacks=[callback, Clock()], limit_val_batches=0).fit(fresh(), federated_blobs())
    # One write in 40 s: the rounds 1, 1 + 38, and so on; and one at the end.
    assert written == [1, 39, 77, 100]


def test_a_resumed_fit_has_all_rounds_and_an_interrupted_one_a_report(tmp_path):
    path = tmp_path / "report.html"
    broken = [Report(path), Watch(path, stop_after=3), L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=True)]
    with pytest.raises(ValueError, match="enough"):
        quiet_trainer(strategy(), 5, callbacks=broken, enable_checkpointing=True).fit(fresh(), federated_blobs())
    assert "· interrupted ·" in path.read_text(encoding="utf-8")
    path.unlink()
    callback = Report(path)
    trainer = quiet_trainer(strategy(), 5, callbacks=[callback])
    trainer.fit(fresh(), federated_blobs(), ckpt_path=tmp_path / "last.ckpt")
    assert callback.record.rounds.round == (0, 1, 2, 3, 4)
    assert rounds_in(path) == 5


def test_nothing_is_written_by_other_processes_and_with_fast_dev_run(tmp_path):
    path = tmp_path / "report.html"
    quiet_trainer(strategy(), 1, callbacks=[Report(path)], fast_dev_run=True).fit(fresh(), federated_blobs())
    assert not path.exists()
    callback = Report(path)
    trainer = quiet_trainer(strategy(), 1, callbacks=[callback])
    trainer.strategy.global_rank = 1
    trainer.fit(fresh(), federated_blobs())
    assert callback.record.rounds.round == (0,)
    assert not path.exists()
