# SPDX-License-Identifier: Apache-2.0
import io
from types import SimpleNamespace

import pytest
import torch
from callback_fakes import fake_trainer, round_record

from fl_lightning.report.callbacks import ConflictMonitor, RoundConflicts


def finish(monitor, record, trainer=None):
    trainer = trainer or fake_trainer()
    trainer.strategy.last_round = record
    monitor.on_train_epoch_end(trainer, None)


def test_summary_over_rounds():
    monitor = ConflictMonitor()
    finish(monitor, round_record(0, conflicts=3, layers={"a": 1, "b": 4}, blocks=(1, 4)))
    finish(monitor, round_record(1, conflicts=0, layers={"a": 0, "b": 2}, blocks=(0,), merged=2))
    finish(monitor, round_record(2, conflicts=1, layers={"a": 0, "b": 0}, blocks=(0, 0), flagged=True, clients=1))
    finish(monitor, round_record(3, conflicts=0, layers={"a": 0, "b": 0}, blocks=(0,), merged=1, flagged=True))
    summary = monitor.summary()
    assert summary.rounds == 4
    assert summary.clients == pytest.approx(13 / 4)
    assert summary.model == 1.0
    assert summary.layers == {"a": 0.25, "b": 1.5}
    assert summary.blocks == 1.25
    assert (summary.merged, summary.flagged, summary.merged_or_flagged) == (0.5, 0.5, 0.75)
    assert monitor.rounds[0] == RoundConflicts(0, 4, 3, {"a": 1, "b": 4}, 5, 0, False)


def test_a_round_is_in_the_checkpoint_that_follows_its_validation_and_counts_once():
    monitor = ConflictMonitor()
    trainer = fake_trainer(sanity_checking=True)
    trainer.strategy.last_round = round_record(0, conflicts=2)
    monitor.on_validation_end(trainer, None)
    assert monitor.rounds == []
    monitor.on_validation_end(fake_trainer(strategy=trainer.strategy, state=SimpleNamespace(fn="validate")), None)
    assert monitor.rounds == []
    trainer.sanity_checking = False
    monitor.on_validation_end(trainer, None)
    assert [entry.model for entry in monitor.rounds] == [2]
    monitor.on_train_epoch_end(trainer, None)
    assert [entry.model for entry in monitor.rounds] == [2]


def test_plot_draws_shares_per_layer_and_round(tmp_path):
    monitor = ConflictMonitor()
    for number in range(3):
        finish(monitor, round_record(number, conflicts=number, layers={"a": 1, "b": 4}))
    figure = monitor.plot(tmp_path / "conflicts.png")
    assert (tmp_path / "conflicts.png").read_bytes().startswith(b"\x89PNG")
    axes, (picture,) = figure.axes[0], figure.axes[0].get_images()
    assert picture.get_array().tolist() == [[0, 25, 50], [25, 25, 25], [100, 100, 100]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["whole model", "a", "b"]
    assert picture.get_extent()[:2] == [0.5, 3.5]  # rounds 1 to 3
    for number in range(3, 500):
        finish(monitor, round_record(number, conflicts=0))
    assert monitor.plot().axes[0].get_images()[0].get_array().shape == (5, 167)
    with pytest.raises(ValueError, match="plot needs at least one finished round, found none"):
        ConflictMonitor().plot()


def test_nothing_to_sum_up():
    monitor = ConflictMonitor()
    finish(monitor, None)
    with pytest.raises(ValueError, match="at least one finished round, found none"):
        monitor.summary()


def test_state_goes_through_a_safe_checkpoint_and_resume_replaces_later_rounds():
    monitor = ConflictMonitor()
    for number in range(3):
        finish(monitor, round_record(number, conflicts=number))
    file = io.BytesIO()
    torch.save(monitor.state_dict(), file)
    file.seek(0)
    resumed = ConflictMonitor()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.rounds == monitor.rounds
    resumed.on_fit_start(fake_trainer(ckpt_path="x.ckpt", current_epoch=1), None)
    finish(resumed, round_record(1, conflicts=4))
    assert [(entry.round, entry.model) for entry in resumed.rounds] == [(0, 0), (1, 4)]


def test_a_fresh_fit_forgets():
    monitor = ConflictMonitor()
    finish(monitor, round_record(0))
    monitor.on_fit_start(fake_trainer(current_epoch=1), None)
    assert len(monitor.rounds) == 1
    monitor.on_fit_start(fake_trainer(), None)
    assert monitor.rounds == []
