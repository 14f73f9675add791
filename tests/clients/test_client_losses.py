# SPDX-License-Identifier: Apache-2.0
"""The clients' losses that methods ask for."""

import pytest
import torch
from support import Classifier, blobs, federated_blobs, fresh, training_only, weights
from torch.nn import functional as F

import fl_lightning as fl


class Noted(fl.algorithms.DRFL):
    """Keeps the losses of the cohort."""

    def aggregate(self, cohort):
        self.seen = cohort.losses.tolist()
        return super().aggregate(cohort)


def losses(module, **options):
    rule = Noted()
    training_only(fl.FederatedStrategy(rule, seed=5, **options), 1).fit(module, federated_blobs())
    return rule.seen


class OfBatch(Classifier):
    """A loss that depends on how many samples are in the batch, as contrastive ones do."""

    def training_step(self, batch, batch_idx):
        SIZES.append((self.training, len(batch[1])))
        return super().training_step(batch, batch_idx) * len(batch[1])


SIZES: list[tuple[bool, int]] = []  # an attribute of the module would come back as it was


def test_losses_are_measured_in_batches_as_in_training():
    SIZES.clear()
    losses(fresh(OfBatch))
    trained, measured = ([size for training, size in SIZES if training == kind] for kind in (True, False))
    assert len(trained) > 6
    assert sorted(trained) == sorted(measured)


def test_a_single_last_sample_joins_the_batch_before_as_in_training():
    """Where a module has BatchNorm; some modules squeeze a batch of one away."""
    SIZES.clear()
    data = fl.FederatedDataModule(blobs(18), fl.data.IID(2), batch_size=4)
    training_only(fl.FederatedStrategy(Noted()), 1).fit(fresh(OfBatch, norm=True), data)
    assert [size for _, size in SIZES] == [4, 5] * 4


def test_loss_batch_size():
    mean = losses(fresh())
    assert losses(fresh(), loss_batch_size=1000) == pytest.approx(mean)
    assert losses(fresh(), loss_batch_size=1) == pytest.approx(mean)
    one, all_ = (losses(fresh(OfBatch), loss_batch_size=size) for size in (1, 1000))
    assert one == pytest.approx(mean)
    assert all(b > 5 * a for a, b in zip(one, all_, strict=True))
    with pytest.raises(ValueError, match=r"loss_batch_size of .* must be None or a positive integer, found 0"):
        fl.FederatedStrategy(loss_batch_size=0)


class Penalised(Classifier):
    """A loss made of gradients."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(self(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


class Explicit(Penalised):
    def federated_loss(self, batch, batch_idx):
        with torch.enable_grad():
            return self.training_step(batch, batch_idx)


@pytest.mark.parametrize("algorithm", [fl.algorithms.FedLF, fl.algorithms.FedMDFG])
def test_a_training_step_may_differentiate(algorithm):
    ends = []
    for module_class in (Penalised, Explicit):
        module = fresh(module_class)
        training_only(fl.FederatedStrategy(algorithm(), seed=5), 2).fit(module, federated_blobs())
        ends.append(weights(module))
    assert torch.equal(*ends)
    assert losses(fresh(Penalised)) == losses(fresh(Explicit))
