# SPDX-License-Identifier: Apache-2.0
"""What client rules may do beside a loss term: hooks, weights, the server's step, personal models, features."""

from __future__ import annotations

from typing import ClassVar

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from support import FEATURES, Classifier, federated_blobs, fit, fresh, on_path, quiet_trainer, weights
from torch.utils.data import Dataset
from torchmetrics import MaxMetric, MeanMetric

import fl_lightning as fl
from fl_lightning.algorithms import ClientRule, FedAvg, FedLF, FedProto, Needs
from fl_lightning.algorithms.features import FeatureRecorder, own_features
from fl_lightning.clients.module_isolation import ModuleIsolation
from fl_lightning.core.model_snapshot import Snapshot

PATHS = [on_path(True), on_path(False)]
both_paths = pytest.mark.parametrize("path", PATHS, ids=["lean", "full"])


def fit_with(client, module=None, rounds=2, **trainer):
    """A fit with a client rule; the clients pass twice over their data."""
    return fit(module, rounds, client=client, local_epochs=2, **trainer)


class NoIndex(Classifier):
    def training_step(self, batch):
        return super().training_step(batch, 0)


class Watching(ClientRule):
    """Writes down what it is called with."""

    def __init__(self):
        self.calls = []

    def begin_client(self, work):
        self.calls.append(("client", work.client_id))

    def begin_batch(self, work, batch, batch_idx):
        assert torch.equal(work.row, torch.cat([p.detach().reshape(-1) for p in work.parameters]))
        self.calls.append(("batch", batch_idx, len(batch[1]), work.steps))

    def loss_term(self, work, batch, batch_idx):
        self.calls.append(("term", batch_idx, len(batch[1]), work.steps))
        return


@pytest.mark.parametrize(("module", "path"), [(Classifier, PATHS[1]), (NoIndex, PATHS[0])])
def test_begin_batch_and_loss_term_see_every_batch_with_its_place(path, module):
    rule = Watching()
    trained = fit_with(rule, fresh(module), **path).module
    assert torch.equal(weights(trained), weights(fit_with(ClientRule(), fresh(module), **path).module))
    visits: list[list] = []
    for kind, *rest in rule.calls:
        if kind == "client":
            visits.append([])
        else:
            visits[-1].append((kind, *rest))
    for visit in visits:
        batches, terms = visit[::2], visit[1::2]
        assert [call[1:] for call in batches] == [call[1:] for call in terms]
        assert {call[0] for call in batches} == {"batch"}
        assert {call[0] for call in terms} == {"term"}
        assert [index for _, index, *_ in batches] == 2 * list(range(len(batches) // 2))  # two passes
        assert [steps for *_, steps in batches] == list(range(len(batches)))
    assert max(len(visit) for visit in visits) > 4
    assert sum(kind == "batch" for kind, *_ in rule.calls) == trained.trainer.strategy.last_round.local_steps


class Half(ClientRule):
    def shape_loss(self, work, loss):
        return 0.5 * loss


@both_paths
def test_a_shaped_loss_takes_the_place_of_the_modules_own(path):
    halved = fit_with(Half(), fresh(lr=0.2), **path).module
    plain = fit_with(ClientRule(), fresh(lr=0.1), **path).module
    torch.testing.assert_close(weights(halved), weights(plain), rtol=0, atol=1e-6)


class Shifting(ClientRule):
    """Adds one to every coordinate of the step; commits come afterwards."""

    def __init__(self):
        self.order = []

    def adjust_step(self, cohort, step):
        self.order.append("adjust")
        return step + 1

    def commit(self, cohort):
        self.order.append("commit")

    def refusal(self, server):
        return None if server.averages else "shifts means"


def test_adjusted_step_is_what_is_applied_and_logged():
    rule = Shifting()
    moved, strategy, _ = fit_with(rule, rounds=1)
    plain, other, _ = fit_with(ClientRule(), rounds=1)
    torch.testing.assert_close(weights(moved), weights(plain) - 1, rtol=0, atol=1e-5)
    assert rule.order == ["adjust", "commit"]
    assert strategy.last_round.step_norm > other.last_round.step_norm + 1
    assert torch.equal(strategy.last_round.weights, other.last_round.weights)
    with pytest.raises(ValueError, match=r"client=Shifting\(\.\.\.\) shifts means"):
        fl.FederatedStrategy(FedLF(), client=Shifting())


class Broken(ClientRule):
    def adjust_step(self, cohort, step):
        return step * float("nan")

    def commit(self, cohort):
        raise AssertionError("a step that is not finite must not be committed")


def test_adjusted_step_must_be_finite():
    with pytest.raises(RuntimeError, match="finite step"):
        fit_with(Broken())


class Picky(ClientRule):
    def check_module(self, module, layout):
        raise ValueError(f"{type(module).__name__} will not do")


def test_check_module_comes_before_the_first_round():
    with pytest.raises(ValueError, match="Classifier will not do"):
        fit_with(Picky())


class Asking(ClientRule):
    """Asks for the loss before every batch, twice."""

    def __init__(self):
        self.losses = []

    def begin_batch(self, work, batch, batch_idx):
        first, again = work.own_loss(batch, batch_idx), work.own_loss(batch, batch_idx)
        assert first.requires_grad
        assert torch.equal(first, again)
        self.losses.append(first.item())


class Counting(Classifier):
    def __init__(self):
        super().__init__(log=True)
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        self.mean.update(len(batch[1]))
        self.log("seen", self.mean)
        return super().training_step(batch, batch_idx)


@both_paths
def test_own_loss_leaves_no_trace(path):
    rule = Asking()
    asked, strategy, _ = fit_with(rule, fresh(Counting), **path)
    plain, other, _ = fit_with(ClientRule(), fresh(Counting), **path)
    assert torch.equal(weights(asked), weights(plain))
    names = set(plain.trainer.callback_metrics) - {"fed/seconds"}
    assert all(asked.trainer.callback_metrics[n] == plain.trainer.callback_metrics[n] for n in names)
    assert strategy.last_round.train_loss == other.last_round.train_loss
    assert len(rule.losses) == asked.trainer.strategy.last_round.local_steps


class Silent(Classifier):
    def training_step(self, batch, batch_idx):
        return None


def test_own_loss_needs_a_loss():
    with pytest.raises(fl.ClientError, match="training_step must return a loss for every batch"):
        fit_with(Asking(), fresh(Silent))


def test_silence_gives_back_what_stood_in_place_of_log():
    module = fresh()
    module.__dict__["log"] = shadow = object()
    with ModuleIsolation(module).unseen(evaluate=False):
        assert module.log("a", 1) is None
        assert module.training
    assert module.__dict__["log"] is shadow
    assert "log_dict" not in module.__dict__


# ---- features


class SameBatch(Dataset):
    """Batches that are the same objects in every pass."""

    batches: ClassVar[dict] = {}

    def __init__(self, samples=24):
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(samples, FEATURES, generator=generator), torch.arange(samples) % 4

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return index

    def collate(self, indices):
        key = tuple(indices)
        return self.batches.setdefault(key, [self.x[list(key)], self.y[list(key)]])


class SameBatches(L.LightningDataModule):
    def train_dataloader(self):
        data = SameBatch()
        return torch.utils.data.DataLoader(data, batch_size=12, collate_fn=data.collate)


def test_features_of_an_earlier_pass_are_not_taken_for_new_ones():
    modules = []
    for reuse in (True, False):
        SameBatch.batches = {}
        data = fl.FederatedDataModule(SameBatches(), fl.data.IID(2), labels=torch.arange(24) % 4, seed=0)
        strategy = fl.FederatedStrategy(FedProto(5.0, num_classes=4), local_epochs=3)
        module = fresh()
        if not reuse:
            SameBatch.collate = lambda self, indices: [self.x[indices], self.y[indices]]
        quiet_trainer(strategy, 2, limit_val_batches=0).fit(module, data)
        modules.append(weights(module))
    assert torch.equal(*modules)


def test_a_tap_keeps_only_what_was_computed_with_gradients():
    module = fresh()
    tap, batch = FeatureRecorder(module), [torch.randn(3, FEATURES), torch.zeros(3, dtype=torch.int64)]
    tap.install()
    with torch.no_grad():
        module.federated_features(batch)
    assert tap.output(batch) is None
    kept = module.federated_features(batch)
    assert tap.output(batch) is kept
    assert tap.output(list(batch)) is None
    tap.forget()
    assert tap.output(batch) is None
    tap.remove()
    assert "federated_features" not in vars(module)


class HalfPrecision(ClientRule):
    needs = Needs(features=True)

    def loss_term(self, work, batch, batch_idx):
        features = own_features(work, batch)
        assert features.values.dtype == torch.float32
        assert features.labels.dtype == torch.int64
        self.inside = torch.is_autocast_enabled("cpu")
        return


class Autocast(Classifier):
    def federated_features(self, batch):
        features, y = super().federated_features(batch)
        Autocast.dtype = features.dtype
        return features, y


def test_features_are_computed_in_the_trainers_precision():
    fit_with(HalfPrecision(), fresh(Autocast), precision="bf16-mixed")
    assert Autocast.dtype == torch.bfloat16


# ---- personal models


class Owning(ClientRule):
    """Client 0 owns a model of zeros, whatever happens."""

    def personal_model(self, client_id):
        n = sum(p.numel() for p in fresh().parameters())
        return Snapshot(torch.zeros(n), torch.empty(0, dtype=torch.uint8)) if client_id == 0 else None


class Logging(Classifier):
    """Logs in all ways that have a value per client."""

    def __init__(self):
        super().__init__()
        self.largest = MaxMetric()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        assert not self.training
        self.log("weighted", logits.abs().sum(), batch_size=len(y))
        self.log_dict({"sum": float(len(y)), "most": float(len(y))}, reduce_fx="sum")
        self.log("least", float(len(y)), reduce_fx=torch.min)
        self.log("greatest", float(len(y)), reduce_fx="max")
        self.log("step_only", 1.0, on_step=True, on_epoch=False)
        self.largest.update(logits.abs().max())
        self.log("metric", self.largest)


def test_personal_evaluation_reduces_what_is_logged():
    strategy = fit_with(Owning(), fresh(Logging)).strategy
    record = strategy.last_evaluation
    own = {name.removeprefix("personal/"): v for name, v in record.values.items() if name.startswith("personal/")}
    assert set(own) == {"weighted", "sum", "most", "least", "greatest", "metric"}
    place = record.client_ids.index(0)
    assert own["weighted"][place] == own["metric"][place] == 0  # logits of a model of zeros
    assert record.values["weighted"][place] > 0
    for name in ("sum", "most", "least", "greatest"):
        assert own[name][place] == record.values[name][place]
    others = [i for i in range(len(record.client_ids)) if i != place]
    assert all(values[others].isnan().all() for values in own.values())


def test_personal_models_are_not_evaluated_in_the_sanity_check():
    asked = []

    class Noting(Owning):
        def personal_model(self, client_id):
            asked.append(client_id)
            return super().personal_model(client_id)

    strategy = fl.FederatedStrategy(FedAvg(), client=Noting())
    trainer = quiet_trainer(strategy, 1, num_sanity_val_steps=2, check_val_every_n_epoch=2)
    trainer.fit(fresh(), federated_blobs())
    assert asked == []
    trainer.validate(trainer.lightning_module, federated_blobs(), verbose=False)
    assert asked == list(strategy.last_evaluation.client_ids)


def test_loss_of_the_module_is_what_training_sees():
    """The term and the module's loss come from the same batch, on the device, after hooks."""

    class Same(ClientRule):
        def loss_term(self, work, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(work.module(x), y)

    doubled = fit_with(Same(), fresh(lr=0.05)).module
    plain = fit_with(ClientRule(), fresh(lr=0.1)).module
    torch.testing.assert_close(weights(doubled), weights(plain), rtol=0, atol=1e-6)
