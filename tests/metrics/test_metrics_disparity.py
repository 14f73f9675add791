# SPDX-License-Identifier: Apache-2.0
import copy
import doctest
import math
import pickle

import pytest
import torch
from support import Classifier as Plain
from support import federated_blobs, fresh, quiet_trainer

import fl_lightning as fl
from fl_lightning.metrics import DemographicParityGap, EqualOpportunityGap, _gaps, disparity, functional

CLIENTS = 5


def people(count=300, seed=0):
    """Predictions, labels, groups, client ids; nobody of client 3 is in group 1, and client 4 has no data."""
    draw = torch.Generator().manual_seed(seed)
    predictions, labels, groups = (torch.randint(0, 2, (count,), generator=draw) for _ in range(3))
    ids = torch.randint(0, 4, (count,), generator=draw)
    return predictions, labels, torch.where(ids == 3, 0, groups), ids


def gap_by_loop(predictions, labels, groups, equal_opportunity):
    hits, totals = [0, 0], [0, 0]
    for predicted, label, group in zip(predictions.tolist(), labels.tolist(), groups.tolist(), strict=True):
        if label == 1 or not equal_opportunity:
            totals[group] += 1
            hits[group] += predicted
    return hits[1] / totals[1] - hits[0] / totals[0] if all(totals) else math.nan


def fed(equal_opportunity, predictions, labels, groups, ids, **options):
    metric = (EqualOpportunityGap if equal_opportunity else DemographicParityGap)(CLIENTS, **options)
    for p, y, a, k in zip(*(part.split(17) for part in (predictions, labels, groups, ids)), strict=True):
        metric.update(*((p, y, a) if equal_opportunity else (p, a)), client_ids=k)
    return metric


@pytest.mark.parametrize("equal_opportunity", [False, True])
def test_gaps_per_client_and_pooled_are_those_of_a_plain_loop(equal_opportunity):
    predictions, labels, groups, ids = people()
    metric = fed(equal_opportunity, predictions, labels, groups, ids)
    expected = [
        gap_by_loop(predictions[ids == k], labels[ids == k], groups[ids == k], equal_opportunity)
        for k in range(CLIENTS)
    ]
    assert metric.client_values().tolist() == pytest.approx(expected, nan_ok=True, abs=1e-15)
    assert math.isnan(expected[3])
    assert math.isnan(expected[4])
    pooled = gap_by_loop(predictions, labels, groups, equal_opportunity)
    assert float(metric.pooled()) == pytest.approx(pooled, abs=1e-15)
    signed = max(expected[:3], key=abs)
    assert float(metric.compute()) == pytest.approx(abs(signed), abs=1e-15)
    again = fed(equal_opportunity, predictions, labels, groups, ids, signed=True)
    assert float(again.compute()) == pytest.approx(signed, abs=1e-15)
    function = functional.equal_opportunity_gap if equal_opportunity else functional.demographic_parity_gap
    arguments = (predictions.bool(), labels, groups) if equal_opportunity else (predictions.bool(), groups)
    assert float(function(*arguments)) == pytest.approx(pooled, abs=1e-15)
    metric.reset()
    assert int(metric.totals.sum()) == 0


def test_pooled_gap_can_hide_those_of_the_clients():
    metric = DemographicParityGap(2)
    metric.update(torch.tensor([1, 0]), torch.tensor([1, 0]), client_ids=0)
    metric.update(torch.tensor([1, 0]), torch.tensor([0, 1]), client_ids=1)
    assert metric.client_values().tolist() == [1.0, -1.0]
    assert float(metric.pooled()) == 0.0
    assert float(metric.compute()) == 1.0


@pytest.mark.parametrize("metric", [DemographicParityGap(3), EqualOpportunityGap(3)])
def test_a_group_that_nobody_is_in_makes_no_number(metric):
    groups, ones = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    metric.update(*((ones, groups) if isinstance(metric, DemographicParityGap) else (ones, ones, groups)))
    assert math.isnan(metric.compute())
    assert math.isnan(metric.pooled())
    assert math.isnan(functional.demographic_parity_gap(ones, groups))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.tensor([0.5]), torch.tensor([1])), r"predictions must be 0 or 1, found \[0.5\]"),
        ((torch.tensor([1]), torch.tensor([2])), r"groups must be 0 or 1, found \[2\]"),
        ((torch.tensor([1]), torch.tensor([1, 0])), r"groups must be a vector .* \[1\], found \[2\]"),
        ((torch.tensor([[1]]), torch.tensor([[1]])), r"predictions must be a vector"),
        ((torch.tensor([1]), torch.tensor([1]), 3), r"client_ids must be in \[0, 3\), found \[3\]"),
        ((torch.tensor([1]), torch.tensor([1]), torch.tensor([0.0])), r"client_ids must be integers"),
        ((torch.tensor([1]), torch.tensor([1]), torch.tensor([0, 1])), r"client_ids must be one id, or one per"),
    ],
)
def test_bad_input_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        DemographicParityGap(3).update(*arguments)


def test_number_of_clients_must_be_positive():
    with pytest.raises(ValueError, match="num_clients of DemographicParityGap must be a positive integer, found 0"):
        DemographicParityGap(0)


def test_metric_survives_copies_pickles_and_a_state_dict():
    metric = fed(False, *people())
    value = metric.compute()
    assert copy.deepcopy(metric).compute() == value
    assert pickle.loads(pickle.dumps(metric)).compute() == value
    metric.persistent(True)
    other = DemographicParityGap(CLIENTS)
    other.persistent(True)
    other.load_state_dict(metric.state_dict())
    assert torch.equal(other.client_values().nan_to_num(), metric.client_values().nan_to_num())


def test_doctests_run():
    for module in (disparity, _gaps):
        result = doctest.testmod(module, extraglobs={"torch": torch})
        assert result.attempted >= 2
        assert result.failed == 0


class Judged(Plain):
    """Logs the gap between two groups that the first feature tells apart."""

    def __init__(self):
        super().__init__()
        self.gap = DemographicParityGap()

    def validation_step(self, batch, batch_idx):
        predicted, group = self(batch[0]).argmax(1) < 2, batch[0][:, 0] > 0
        self.gap.update(predicted, group)
        self.log("val_disparity", self.gap)


@pytest.mark.fit
@pytest.mark.filterwarnings("ignore:val_disparity is undefined for client")  # that lacks a group
def test_logged_by_a_module_it_gives_every_clients_own_and_the_pooled_gap():
    strategy = fl.FederatedStrategy(seed=1)
    trainer, data = quiet_trainer(strategy, 1), federated_blobs()
    module = fresh(Judged)
    trainer.fit(module, data)
    loaders, values = data.val_dataloader(), {}
    everything = []
    for client in range(6):
        batches = [batch for batch, _ in loaders.batches(client, seed=None)]
        predicted = torch.cat([module(x).argmax(1) < 2 for x, _ in batches]).long()
        group = torch.cat([x[:, 0] > 0 for x, _ in batches]).long()
        everything.append((predicted, group))
        values[client] = abs(gap_by_loop(predicted, predicted, group, False))
    record = strategy.last_evaluation
    own = dict(zip(record.client_ids, record.values["val_disparity"].tolist(), strict=True))
    assert own == pytest.approx(values, nan_ok=True, abs=1e-6)
    predicted, group = (torch.cat(parts) for parts in zip(*everything, strict=True))
    pooled = abs(gap_by_loop(predicted, predicted, group, False))
    assert float(trainer.callback_metrics["val_disparity"]) == pytest.approx(pooled, abs=1e-6)
    worst = max(value for value in values.values() if not math.isnan(value))
    assert float(trainer.callback_metrics["fed/val_disparity/max"]) == pytest.approx(worst, abs=1e-6)
    assert "fed/val_disparity/angle" not in trainer.callback_metrics, "smaller disparities are better"
