# SPDX-License-Identifier: Apache-2.0
"""Fits of whole methods in a Trainer, and what must hold for all of them."""

import torch
from resuming import differences
from support import Classifier, fit, fresh, weights

from fl_lightning.core.storage import rule_state


class FailsInRoundOne(Classifier):
    def training_step(self, batch, batch_idx):
        if self.trainer.current_epoch == 1:
            raise RuntimeError("no")
        return super().training_step(batch, batch_idx)


def fit_method(method, rounds=3, module=None, **options):
    """The trained module and its strategy; BatchNorm, momentum, four of six clients per round."""
    module = fresh(Classifier, norm=True, momentum=0.5) if module is None else module
    return fit(module, rounds, algorithm=method, **{"clients_per_round": 4, "seed": 2, **options})[:2]


def trained(method, **options):
    """All weights and buffers after a fit without validation."""
    return weights(fit_method(method, **{"limit_val_batches": 0, **options})[0])


def assert_resumes(make, folder, rounds=3, **options):
    """A fit of ``rounds`` rounds equals one that was interrupted after each of them, bit for bit."""
    whole, strategy = fit_method(make(), rounds, **options)
    for done in range(1, rounds):
        module, _ = fit_method(make(), done, **options)
        path = folder / f"{done}.ckpt"
        module.trainer.save_checkpoint(path)
        other = fresh(Classifier, seed=9, norm=True, momentum=0.5)
        resumed, again = fit_method(make(), rounds, module=other, ckpt_path=path, **options)
        assert torch.equal(weights(whole), weights(resumed))
        assert_same(rule_state.state_dict(strategy.client_rule), rule_state.state_dict(again.client_rule))


def assert_same(one, two):
    assert not differences(one, two)
