# SPDX-License-Identifier: Apache-2.0
"""Methods that change local training, beside FedAvg, in a Trainer."""

from functools import cache

import pytest
import torch
from method_fits import trained

from fl_lightning.algorithms import MOON, FedAvg, FedCKA, FedProc, FedProto

pytestmark = pytest.mark.fit


@cache
def averaged(rounds, weighting="samples"):
    return trained(FedAvg(weighting), rounds=rounds)


@pytest.mark.parametrize("method", [FedCKA(0.0), MOON(0.0)], ids=["FedCKA", "MOON"])
def test_mu_0_is_fedavg_bit_for_bit(method):
    assert torch.equal(trained(method), averaged(3))


@pytest.mark.parametrize(
    "method",
    [FedCKA(), MOON(5.0), FedProto(2.0, num_classes=4), FedProc(num_classes=4)],
    ids=["FedCKA", "MOON", "FedProto", "FedProc"],
)
def test_the_first_round_is_fedavg_and_later_ones_are_not(method):
    """Nobody has a last model or prototypes."""
    assert torch.equal(trained(method, rounds=1), averaged(1))
    assert not torch.allclose(trained(method), averaged(3), atol=1e-3)
