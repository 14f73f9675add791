# SPDX-License-Identifier: Apache-2.0
"""One client with all data is plain Lightning, bit for bit: the server takes the parameters that it has trained."""

import pytest
import torch
from schedules import Ordered, one_client_fit, plain_fit
from support import Classifier, fresh, training_only, weights

import fl_lightning as fl

OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Adamax", "Rprop")


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_in_every_precision_with_every_optimizer(optimizer, precision):
    class Own(Classifier):
        def configure_optimizers(self):
            return getattr(torch.optim, optimizer)(self.parameters(), lr=0.02)

    plain, ours = fresh(Own), fresh(Own)
    plain_fit(plain, Ordered(), 2, precision=precision)
    one_client_fit(ours, Ordered(), 2, precision=precision)
    assert torch.equal(weights(ours), weights(plain))


@pytest.mark.parametrize(
    "options",
    [
        {"attack": fl.attacks.ZeroUpdates(clients=(0,))},
        {"guard": fl.guards.CentredClipping(0.01)},
        {"full_gradients": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_step_that_is_not_what_the_client_trained_is_taken_as_it_is(options):
    module, start = fresh(), weights(fresh())
    strategy = fl.FederatedStrategy(**options)
    training_only(strategy, 1).fit(module, fl.FederatedDataModule(Ordered(), fl.data.IID(1)))
    moved = float((weights(module) - start).norm())
    assert moved == pytest.approx(strategy.last_round.step_norm, abs=1e-6)
    one_client_fit(trained := fresh(), Ordered(), 1)
    assert not torch.allclose(weights(module), weights(trained), atol=1e-3)
