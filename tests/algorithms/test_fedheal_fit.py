# SPDX-License-Identifier: Apache-2.0
"""FedHEAL in a Trainer, over methods that change local training."""

import pytest
import torch
from support import federated_blobs, fresh, training_only, weights

import fl_lightning as fl

pytestmark = pytest.mark.fit


@pytest.mark.parametrize("client", [None, fl.algorithms.FedProx(), fl.algorithms.SCAFFOLD()])
def test_it_combines_with_local_methods(client):
    module, before = fresh(norm=True), weights(fresh(norm=True))
    strategy = fl.FederatedStrategy(fl.algorithms.FedHEAL(), client=client, clients_per_round=3, seed=1)
    training_only(strategy, 4).fit(module, federated_blobs())
    assert torch.isfinite(weights(module)).all()
    assert not torch.equal(weights(module), before)
    assert 0 < strategy.last_round.scalars["kept_share"] <= 1
