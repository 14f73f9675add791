# SPDX-License-Identifier: Apache-2.0
"""Metrics on a device: what they make themselves lies beside what they are given, and results are those of the CPU."""

import pytest
import torch
from remote_device import ELSEWHERE, RemoteDevice

from fl_lightning import metrics

IDS = torch.tensor([0, 0, 1, 1, 2, 2, 2, 2])
VALUES = torch.tensor([0.1, 0.5, 0.7, 0.2, 0.9, 0.3, 0.4, 0.6])
PREDICTED = torch.tensor([1, 0, 1, 1, 0, 1, 0, 1])
LABELS = torch.tensor([1, 1, 1, 0, 0, 1, 0, 0])
GROUPS = torch.tensor([0, 0, 1, 1, 0, 1, 0, 1])
SIZES = torch.arange(1, 9)
METRICS = {
    "FairnessAngle": (lambda: metrics.FairnessAngle(3), (VALUES, IDS)),
    "ClientStd": (lambda: metrics.ClientStd(3), (VALUES, IDS)),
    "WorstFraction": (lambda: metrics.WorstFraction(3, fraction=0.5), (VALUES, IDS)),
    "BestFraction": (lambda: metrics.BestFraction(3, fraction=0.5), (VALUES, IDS)),
    "DemographicParity": (lambda: metrics.DemographicParity(num_clients=3), (PREDICTED, GROUPS, IDS)),
    "EqualOpportunity": (metrics.EqualOpportunity, (PREDICTED, LABELS, GROUPS)),
    "EqualizedOdds": (lambda: metrics.EqualizedOdds(num_clients=3), (PREDICTED, LABELS, GROUPS, IDS)),
}
FUNCTIONS = {
    "fairness_summary": lambda put: metrics.functional.fairness_summary(put(VALUES), put(SIZES)),
    "conflict_counts": lambda put: vars(metrics.functional.conflict_counts(put(VALUES.view(2, 4) - 0.4))),
    "equalized_odds": lambda put: vars(metrics.functional.equalized_odds(put(PREDICTED), put(LABELS), put(GROUPS))),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics(name):
    (make, given), device = METRICS[name], RemoteDevice()
    here = make()
    here.update(*given)
    with device:
        there = make().to(ELSEWHERE)
        there.update(*map(device.put, given))
        found = there.compute()
    torch.testing.assert_close(device.get(found), here.compute())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    device = RemoteDevice()
    with device:
        found = FUNCTIONS[name](device.put)
    for key, want in FUNCTIONS[name](lambda tensor: tensor).items():
        torch.testing.assert_close(device.get(found[key]), want)
