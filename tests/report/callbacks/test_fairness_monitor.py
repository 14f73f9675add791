# SPDX-License-Identifier: Apache-2.0
import io
import math
from types import SimpleNamespace

import pytest
import torch
from callback_fakes import evaluation_record, fake_trainer, validate

from fl_lightning.lightning.names import TrainerFn
from fl_lightning.metrics.functional import fairness_angle
from fl_lightning.report.callbacks import FairnessCurve, FairnessMonitor


def monitored(rounds):
    trainer, monitor = fake_trainer(), FairnessMonitor()
    monitor.on_fit_start(trainer, None)
    for number in rounds:
        accuracy = [0.1 * number, 0.2 * number, 0.3]
        validate(monitor, trainer, evaluation_record(number, acc=accuracy, loss=[3.0, 2.0, 1.0 / number]))
    return trainer, monitor


def test_curves_hold_mean_angle_and_worst_tenth_per_metric():
    _, monitor = monitored([1, 2, 3])
    assert monitor.metrics == ("acc", "loss")
    accuracy, loss = monitor.curves("acc"), monitor.curves("loss")
    assert accuracy.rounds == loss.rounds == [1, 2, 3]
    assert accuracy.mean == pytest.approx([0.2, 0.3, 0.4])
    assert accuracy.worst_10 == pytest.approx([0.1, 0.2, 0.3])
    assert accuracy.angle[0] == pytest.approx(float(fairness_angle(torch.tensor([0.1, 0.2, 0.3]))))
    assert loss.worst_10 == [3.0, 3.0, 3.0]  # the worst loss is the highest
    assert all(math.isnan(angle) for angle in loss.angle)


def test_orientation_can_be_said():
    trainer, monitor = fake_trainer(), FairnessMonitor(larger_is_better={"acc": False})
    validate(monitor, trainer, evaluation_record(1, acc=[0.1, 0.9, 0.5]))
    assert monitor.curves("acc").worst_10 == [0.9]


def test_sanity_check_other_stages_and_trainer_validate_add_nothing():
    monitor = FairnessMonitor()
    validate(monitor, fake_trainer(sanity_checking=True), evaluation_record(0))
    validate(monitor, fake_trainer(), None)
    validate(monitor, fake_trainer(), evaluation_record(1, stage="test"))
    validate(monitor, fake_trainer(state=SimpleNamespace(fn=TrainerFn.VALIDATING)), evaluation_record(1))
    assert monitor.metrics == ()
    with pytest.raises(ValueError, match=r"metric must be one of \[\], found 'acc'"):
        monitor.curves("acc")


def test_state_goes_through_a_safe_checkpoint_and_resume_replaces_later_points():
    trainer, monitor = monitored([1, 2, 3])
    file = io.BytesIO()
    torch.save(monitor.state_dict(), file)
    file.seek(0)
    resumed = FairnessMonitor()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.curves("acc") == monitor.curves("acc")
    resumed.on_fit_start(fake_trainer(ckpt_path="round2.ckpt", current_epoch=2), None)
    validate(resumed, trainer, evaluation_record(3, acc=[0.9, 0.9, 0.9], loss=[1.0, 1.0, 1.0]))
    assert resumed.curves("acc").rounds == [1, 2, 3]
    assert resumed.curves("acc").mean[2] == pytest.approx(0.9)
    assert len(monitor.curves("acc").mean) == 3  # the copies do not share lists
    assert monitor.curves("acc").mean[2] == pytest.approx(0.4)


def test_a_fresh_fit_forgets_and_a_continued_one_does_not():
    trainer, monitor = monitored([1, 2])
    monitor.on_fit_start(fake_trainer(current_epoch=2), None)
    validate(monitor, trainer, evaluation_record(3, acc=[0.5, 0.5, 0.5], loss=[1.0, 1.0, 1.0]))
    assert monitor.curves("acc").rounds == [1, 2, 3]
    monitor.on_fit_start(fake_trainer(), None)
    assert monitor.metrics == ()


def test_plot_writes_a_picture_without_pyplot(tmp_path):
    _, monitor = monitored([1, 2, 3])
    for name, metric in (("a.png", None), ("b.png", "loss")):
        figure = monitor.plot(tmp_path / name, metric)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        mean, worst = figure.axes[0].get_lines()
        assert mean.get_ydata().tolist() == monitor.curves(metric or "acc").mean
        assert worst.get_ydata().tolist() == monitor.curves(metric or "acc").worst_10
        assert figure.axes[0].get_ylabel() == (metric or "acc")
        assert len(figure.axes) == (1 if metric == "loss" else 2)  # a loss has no angle
    with pytest.raises(ValueError, match=r"metric must be one of \['acc', 'loss'\], found 'f1'"):
        monitor.plot(tmp_path / "c.png", "f1")
    with pytest.raises(ValueError, match="at least one validation"):
        FairnessMonitor().plot(tmp_path / "d.png")


def test_curve_starts_empty_and_is_not_shared():
    FairnessCurve().rounds.append(1)
    assert FairnessCurve().rounds == []
