# SPDX-License-Identifier: Apache-2.0
"""The clients' losses that methods ask for."""

import pytest
import torch
from by_hand import Federation
from support import Classifier, blobs, federated_blobs, fresh, training_only, weights
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from worker_processes import EXECUTORS

import fl_lightning as fl


class Noted(fl.algorithms.DRFL):
    """Keeps the losses of every cohort."""

    def begin_fit(self, federation):
        super().begin_fit(federation)
        self.seen = []

    def aggregate(self, cohort):
        self.seen.append(cohort.losses.tolist())
        return super().aggregate(cohort)


SIZES: list[tuple[bool, int]] = []  # an attribute of the module would come back as it was


class Counted(Classifier):
    """Notes every call."""

    def training_step(self, batch, batch_idx):
        SIZES.append((self.training, len(batch[1])))
        return self.loss(batch, batch_idx)

    def loss(self, batch, batch_idx):
        return Classifier.training_step(self, batch, batch_idx)


def losses(module, rounds=1, data=None, **options):
    """Losses of clients by round, and how many samples each pass had that measured them."""
    SIZES.clear()
    trainer = {"precision": options.pop("precision")} if "precision" in options else {}
    rule = Noted()
    strategy = fl.FederatedStrategy(rule, seed=5, **options)
    training_only(strategy, rounds, **trainer).fit(module, data or federated_blobs())
    return rule.seen, [size for training, size in SIZES if not training]


class OfBatch(Counted):
    """A loss that depends on how many samples are in the batch."""

    def loss(self, batch, batch_idx):
        return super().loss(batch, batch_idx) * len(batch[1])


def test_losses_are_measured_in_batches_as_in_training():
    _, measured = losses(fresh(OfBatch), loss_batch_size="training")
    trained = [size for training, size in SIZES if training]
    assert len(trained) > 6
    assert sorted(trained) == sorted(measured)


def test_a_single_last_sample_joins_the_batch_before_as_in_training():
    """Where a module has BatchNorm; some modules squeeze a batch of one away."""
    data = fl.FederatedDataModule(blobs(18), fl.data.IID(2), batch_size=4)
    losses(fresh(OfBatch, norm=True), data=data, loss_batch_size="training")
    assert [size for _, size in SIZES] == [4, 5] * 4


def test_loss_batch_size():
    mean, _ = losses(fresh())
    for size in (1, 1000, "training"):
        assert losses(fresh(), loss_batch_size=size)[0][0] == pytest.approx(mean[0])
    (one,), _ = losses(fresh(OfBatch), loss_batch_size=1)
    (all_,), _ = losses(fresh(OfBatch), loss_batch_size=1000)
    assert one == pytest.approx(mean[0])
    assert all(b > 5 * a for a, b in zip(one, all_, strict=True))
    with pytest.raises(ValueError, match=r"loss_batch_size of .* None, a positive integer or 'training', found 0"):
        fl.FederatedStrategy(loss_batch_size=0)


# ---- several batches in one pass


class Smoothed(Counted):
    def loss(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1], label_smoothing=0.2)


class Decayed(Counted):
    def loss(self, batch, batch_idx):
        return super().loss(batch, batch_idx) + 0.1 * sum(p.square().sum() for p in self.parameters())


class ClassWeights(Counted):
    def loss(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1], weight=torch.tensor([1.0, 1.5, 1.0, 1.2]))


class Ignoring(Counted):
    def loss(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1], ignore_index=1)


class Contrasting(Counted):
    def loss(self, batch, batch_idx):
        features = F.normalize(self(batch[0]))
        return F.cross_entropy(features @ features.T, torch.arange(len(features)))


class RootOfMean(Counted):
    def loss(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]), F.one_hot(batch[1], 4).float()).sqrt()


class Drawing(Counted):
    def loss(self, batch, batch_idx):
        return super().loss(batch, batch_idx) * (0.5 + torch.rand(()))


class Remembering(Counted):
    """Divides by a moving mean of earlier losses."""

    moving = 1.0

    def loss(self, batch, batch_idx):
        loss = super().loss(batch, batch_idx)
        self.moving = 0.9 * self.moving + 0.1 * float(loss.detach())
        return loss / self.moving


class ByPlace(Counted):
    def loss(self, batch, batch_idx):
        return super().loss(batch, batch_idx) * (1 + 0.1 * batch_idx)


class OfStatistics(Counted):
    """Normalises by the batch, also in eval mode."""

    def loss(self, batch, batch_idx):
        return F.cross_entropy(F.batch_norm(self(batch[0]), None, None, training=True), batch[1])


class UpToTen(Counted):
    def loss(self, batch, batch_idx):
        if len(batch[1]) > 10:
            raise IndexError("there are ten places")
        return super().loss(batch, batch_idx)


class Wide(Counted):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(70_000, 4)


class Blank(Counted):
    """All samples begin with the same loss, whatever it is weighted by."""

    def __init__(self, **options):
        super().__init__(**options)
        torch.nn.init.zeros_(self.net[-1].weight)
        torch.nn.init.zeros_(self.net[-1].bias)


class BlankAndWeighted(Blank, ClassWeights):
    pass


MEANS = {
    "mean": (Counted, {}),
    "statistics of training": (Counted, {"norm": True}),
    "dropout": (Counted, {"dropout": 0.5}),
    "label smoothing": (Smoothed, {}),
    "regulariser": (Decayed, {}),
}
OTHERS = [
    OfBatch, ClassWeights, Ignoring, Contrasting, RootOfMean, Drawing, Remembering, ByPlace, OfStatistics, UpToTen,
]  # fmt: skip
SAID = "the loss of several batches in one is not their mean (loss_batch_size of FederatedStrategy)"


def passes_by_round(rounds, make, **options):
    """Losses, and the sizes of passes in each round, by default and as in training."""
    (found, passes), (apart, plain) = (
        losses(make(), rounds, **options, **o) for o in ({}, {"loss_batch_size": "training"})
    )
    once = len(plain) // rounds
    assert max(plain) <= 11
    return found, passes, apart, plain[:once]


@pytest.mark.parametrize("name", MEANS)
def test_batches_pass_together_once_a_round_has_found_the_same_losses(caplog, name):
    module_class, options = MEANS[name]
    found, passes, apart, plain = passes_by_round(3, lambda: fresh(module_class, **options))
    assert found[0] == apart[0]
    for one, other in zip(found, apart, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    together = [
        min(80, left) for size in federated_blobs().train_dataloader().sizes.tolist() for left in range(size, 0, -80)
    ]
    assert sorted(passes) == sorted(plain + 3 * together)  # in the first round both
    assert SAID not in caplog.text


@pytest.mark.parametrize("module_class", OTHERS)
def test_other_losses_are_measured_as_in_training(caplog, module_class):
    with caplog.at_level("INFO"):
        found, passes, apart, plain = passes_by_round(3, lambda: fresh(module_class))
    assert found == apart
    assert passes[-2 * len(plain) :] == 2 * plain
    assert caplog.text.count(SAID) == 1


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_losses_with_few_digits_tell_nothing(precision):
    found, passes, apart, plain = passes_by_round(2, lambda: fresh(Counted), precision=precision)
    assert found == apart
    assert passes[-len(plain) :] == plain


@pytest.mark.parametrize("module_class", [Blank, BlankAndWeighted])
def test_the_first_round_that_can_tell_decides(module_class):
    found, passes, apart, plain = passes_by_round(3, lambda: fresh(module_class))
    assert passes[: 2 * len(plain)] != 2 * plain
    assert passes[: len(plain)] == plain
    assert (passes[-len(plain) :] == plain) == (found == apart) == (module_class is BlankAndWeighted)


def test_batches_with_much_in_them_pass_alone():
    wide = fl.FederatedDataModule(
        TensorDataset(torch.randn(12, 70_000), torch.arange(12) % 4), fl.data.IID(2), batch_size=2
    )
    assert set(losses(fresh(Wide), 2, wide)[1]) == {2}


def in_turn(strategy, make):
    training_only(strategy, 3).fit(module := make(0), federated_blobs(4))
    return module


def resumed(strategy, make, folder):
    trainer = training_only(strategy, 1)
    trainer.fit(make(0), federated_blobs(4))
    trainer.save_checkpoint(folder / "one.ckpt")
    training_only(strategy, 3).fit(module := make(9), federated_blobs(4), ckpt_path=folder / "one.ckpt")
    return module


@pytest.mark.parametrize("module_class", [Classifier, Contrasting])
def test_all_carriers_give_the_same_bits(tmp_path, module_class):
    def make(seed):
        return fresh(module_class, seed=seed)

    def strategy(**options):
        return fl.FederatedStrategy(fl.algorithms.FedLF(), clients_per_round=3, seed=5, **options)

    expected = weights(in_turn(strategy(), make))
    for executor in EXECUTORS[1:]:
        assert torch.equal(weights(in_turn(strategy(executor=executor), make)), expected)
    assert torch.equal(weights(resumed(strategy(), make, tmp_path)), expected)
    assert torch.equal(weights(Federation(strategy(), make, rounds=3).run(3)), expected)
    apart = weights(in_turn(strategy(loss_batch_size="training"), make))
    assert torch.equal(apart, expected) == (module_class is Contrasting)


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
