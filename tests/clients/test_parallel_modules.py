# SPDX-License-Identifier: Apache-2.0
"""Modules that hold their parameters in more than one place train in worker processes and behind requests."""

import pytest
import torch
from support import CLASSES, Classifier, fresh, train, weights
from torch import nn
from torch.nn import functional as F
from worker_processes import EXECUTORS, FORKS

pytestmark = FORKS


class Recurrent(Classifier):
    """Reads the features one after the other; the cell keeps its parameters in a list as well."""

    def __init__(self, cell=nn.LSTM, **options):
        super().__init__(**options)
        self.cell, self.head = cell(1, 5, num_layers=2, batch_first=True), nn.Linear(5, CLASSES)

    def training_step(self, batch, batch_idx):
        out, _ = self.cell(batch[0].unsqueeze(-1))
        return F.cross_entropy(self.head(out[:, -1]), batch[1]) + super().training_step(batch, batch_idx)


class Listed(Classifier):
    """Keeps parameters and a buffer in plain attributes too, as penalties and logs of norms need them."""

    def __init__(self, **options):
        super().__init__(norm=True, **options)
        self.own = list(self.net.parameters())
        self.by_name = {"all": dict(self.net.named_parameters()), "means": list(self.net.buffers())}

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 1e-3 * sum(p.square().sum() for p in self.own)


@pytest.mark.parametrize(
    ("module", "options"), [(Recurrent, {"cell": nn.LSTM}), (Recurrent, {"cell": nn.GRU}), (Listed, {})]
)
def test_parameters_in_other_places_as_well_are_no_changed_attributes(module, options):
    found = []
    for executor in EXECUTORS:
        model = fresh(module, **options)
        _, strategy, _ = train(model, 2, clients_per_round=5, executor=executor)
        assert strategy.executor_fallback is None
        found.append(weights(model))
    assert all(torch.equal(found[0], each) for each in found[1:])
