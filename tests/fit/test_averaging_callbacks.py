# SPDX-License-Identifier: Apache-2.0
"""Callbacks that average weights, in a federated fit."""

import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from support import Classifier, fit, fresh, weights
from watching import Watcher

# Lightning 2.5 has no such callbacks.
EMAWeightAveraging = getattr(callbacks, "EMAWeightAveraging", Callback)
WeightAveraging = getattr(callbacks, "WeightAveraging", Callback)
since_2_6 = pytest.mark.skipif(WeightAveraging is Callback, reason="Lightning 2.6 brought WeightAveraging")


def test_stochastic_weight_averaging_averages_global_models():
    watcher = Watcher()
    module = fit(rounds=5, callbacks=[StochasticWeightAveraging(0.1, swa_epoch_start=3), watcher]).module
    assert torch.allclose(weights(module), torch.stack(watcher.started[2:]).mean(0), atol=1e-6, rtol=0)


@since_2_6
def test_exponential_averaging_averages_rounds():
    watcher = Watcher()
    ema = EMAWeightAveraging(decay=0.5, update_every_n_steps=0, update_starting_at_epoch=0)
    module = fit(rounds=4, callbacks=[ema, watcher]).module
    expected = watcher.ended[0]
    for after_round in watcher.ended[1:]:
        expected = 0.5 * expected + 0.5 * after_round
    assert torch.allclose(weights(module), expected, atol=1e-6, rtol=0)


class EveryRound(WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None


@since_2_6
def test_averages_of_rounds_by_a_subclass_are_exact():
    watcher = Watcher()
    module = fit(rounds=4, callbacks=[EveryRound(), watcher]).module
    assert torch.allclose(weights(module), torch.stack(watcher.ended).mean(0), atol=1e-6, rtol=0)


class Counting(Classifier):
    """Counts its evaluation batches, over all evaluations."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = 0.0

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.seen += 1
        self.log("seen", self.seen)


@since_2_6
def test_clients_have_values_of_averages_with_batchnorm():
    """The callback lends the module averaged statistics while it is evaluated, and takes them back."""
    for module in (fresh(norm=True), Counting(norm=True)):
        ema = EMAWeightAveraging(decay=0.5, update_every_n_steps=0, update_starting_at_epoch=0)
        record = fit(module, rounds=4, callbacks=[ema]).strategy.last_evaluation
        assert not any(values.isnan().any() for values in record.values.values())
