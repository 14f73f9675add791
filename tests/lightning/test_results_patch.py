# SPDX-License-Identifier: Apache-2.0
"""What ``self.log`` collects is moved where that is needed, and left alone where it is not."""

import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector import result
from support import fit
from torchmetrics import MeanMetric

from fl_lightning.lightning.loop_parts import OneDeviceResults


def logged(results, *values):
    for value in values:
        results.log("validation_step", "seen", value, batch_size=2)
    return results["validation_step.seen"]


@pytest.fixture
def walks(monkeypatch):
    """Lightning's searches for tensors to move."""
    found = []
    apply = result.apply_to_collection
    monkeypatch.setattr(result, "apply_to_collection", lambda *a, **k: [found.append(a), apply(*a, **k)][1])
    return found


def test_logged_tensors_are_those_of_lightnings_own_collection():
    values = [torch.tensor(1.0), torch.tensor(0.5, dtype=torch.float64), torch.tensor(2.0, dtype=torch.bfloat16)]
    own, lightnings = logged(OneDeviceResults(False), *values), logged(result._ResultCollection(False), *values)
    assert torch.equal(own.compute(), lightnings.compute())
    assert own.compute().dtype == lightnings.compute().dtype == torch.float64
    assert own.cumulated_batch_size == lightnings.cumulated_batch_size == 6


def test_tensors_on_the_device_of_their_entry_are_not_looked_for(walks):
    results = OneDeviceResults(False)
    logged(results, torch.tensor(1.0), torch.tensor(2.0))
    results["validation_step.seen"].to("cpu")
    assert walks == []


def test_an_entry_follows_a_value_to_another_device():
    entry = logged(OneDeviceResults(False), torch.tensor(1.0), torch.tensor(2.0, device="meta"))
    assert {entry.value.device.type, entry.cumulated_batch_size.device.type} == {"meta"}
    moved = logged(OneDeviceResults(False), torch.tensor(1.0)).to(torch.device("meta"))
    assert {moved.value.device.type, moved.cumulated_batch_size.device.type} == {"meta"}


def test_metric_objects_are_lightnings_business(walks):
    results = OneDeviceResults(False)
    entry = logged(results, MeanMetric())
    assert type(entry) is result._ResultMetric
    assert len(walks) > 0


@pytest.mark.fit
def test_every_loop_of_a_trainer_collects_so():
    trainer = fit(rounds=1).trainer
    epochs = trainer.fit_loop.epoch_loop
    assert {type(each._results) for each in (epochs, epochs.val_loop, trainer.validate_loop, trainer.test_loop)} == {
        OneDeviceResults
    }
    assert [each._results.training for each in (epochs, epochs.val_loop)] == [True, False]
