# SPDX-License-Identifier: Apache-2.0
"""Visits in which guards are not checked for every batch: only where nothing but counters can have changed."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from planned_fits import agree, both
from support import Blobs, Classifier, blobs, fit, fresh, weights
from torch.utils.data import Dataset

import fl_lightning as fl
from fl_lightning.algorithms.base import ClientRule
from fl_lightning.training.planned.capture import _Guarded
from fl_lightning.training.planned.planned_calls import PlannedCalls

pytestmark = pytest.mark.fit

ALIKE = {"clients_per_round": 3, "local_epochs": 2}


def alike(dataset=None):
    """Six clients with four batches of ten samples each."""
    data = Blobs()
    if dataset is not None:
        data.train_dataloader = lambda: torch.utils.data.DataLoader(dataset, batch_size=10, shuffle=True)
    return fl.FederatedDataModule(data, fl.data.IID(6), seed=0)


@pytest.fixture
def checked(monkeypatch):
    """Counts calls that go through guards."""
    calls, through = [], _Guarded.__call__
    monkeypatch.setattr(_Guarded, "__call__", lambda self, *args: calls.append(1) or through(self, *args))
    return calls


@pytest.mark.parametrize("log", [False, True])
def test_guards_are_checked_at_the_beginning_and_at_the_end(log, caplog, checked):
    eager, planned, _ = both(caplog, data=alike(), rounds=3, options={"log": log}, **ALIKE)
    agree(eager, planned)
    steps = 3 * 3 * 8
    assert planned.strategy.last_round.planned_steps == 3 * 8
    # Per visit two and the last, per round the check at its end; once for the capture.
    assert len(checked) <= 3 * 3 * 3 + 3 + 1 < steps


FACTOR = {"value": 1.0, "seen": 0}


def changes(every=3):
    """Changes what a step reads now and then: after so many calls."""
    FACTOR["seen"] += 1
    if FACTOR["seen"] % every == 0:
        FACTOR["value"] += 0.25


@pytest.fixture(autouse=True)
def unchanged():
    FACTOR.update(value=1.0, seen=0)


class Reads(Classifier):
    """Reads a number that other code changes now and then."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * FACTOR["value"]


class AskedData(Dataset):
    """Gives samples one by one."""

    def __init__(self):
        self.samples = blobs(240)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        changes(every=40)
        return self.samples[index]


class Transfers(Reads):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        changes()
        return batch


class WatchedOptimizer(Reads):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: changes())
        return optimizer


class OwnOptimizer(Reads):
    def configure_optimizers(self):
        class Counting(torch.optim.SGD):
            def step(self, closure=None):
                changes()
                return super().step(closure)

        return Counting(self.parameters(), lr=0.1)


class BeforeBatches(ClientRule):
    def begin_batch(self, work, batch, batch_idx):
        changes()


class AfterGradients(ClientRule):
    def correct_gradients(self, work):
        changes()


class Attack(fl.attacks.LabelFlip):
    def change_batch(self, batch):
        changes()
        return super().change_batch(batch)


OTHER_CODE = {
    "data": (Reads, {"dataset": AskedData}),
    "transfer hooks": (Transfers, {}),
    "hooks of the optimizer": (WatchedOptimizer, {}),
    "an optimizer of its own": (OwnOptimizer, {}),
    "a rule before batches": (Reads, {"client": BeforeBatches()}),
    "a rule after gradients": (Reads, {"client": AfterGradients()}),
    "an attack": (Reads, {"attack": Attack(clients=tuple(range(6)), num_classes=4)}),
}


@pytest.mark.filterwarnings("ignore:You have overridden")
@pytest.mark.parametrize("case", OTHER_CODE)
def test_other_code_between_batches_may_change_what_a_step_reads(case, caplog):
    module, options = OTHER_CODE[case]
    options = dict(options)
    dataset = options.pop("dataset", None)
    found = []
    for mode in ("never", "always"):
        FACTOR.update(value=1.0, seen=0)
        data = alike(None if dataset is None else dataset())
        found.append(fit(fresh(module, log=True), 2, planned_steps=mode, data=data, **ALIKE, **options))
    agree(*found)
    assert FACTOR["value"] > 2


class Counters(Classifier):
    """Reads what changes within a visit, one way or another."""

    what = ""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * getattr(self, self.what)(batch_idx)

    def last(self, index):
        return 3.0 if self.trainer.is_last_batch else 1.0

    def later(self, index):
        return 2.0 if index > 4 else 1.0

    def step(self, index):
        return 2.0 if self.trainer.global_step % 8 > 4 else 1.0

    def rate(self, index):
        return 1 + self.trainer.optimizers[0].param_groups[0]["lr"]

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if self.what != "rate":
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("what", ["last", "later", "step", "rate"])
def test_what_changes_within_a_visit_is_read_anew(what, caplog, monkeypatch):
    monkeypatch.setattr(Counters, "what", what)
    eager, planned, _ = both(caplog, Counters, data=alike(), **ALIKE)
    agree(eager, planned)
    assert not torch.equal(weights(planned.module), weights(fit(fresh(), 3, data=alike(), **ALIKE).module))


def test_a_wrong_program_is_found_where_guards_were_not_checked(monkeypatch):
    """The plan is right at first and goes wrong in the middle of a visit, between two checks."""
    eager = fit(fresh(), 3, planned_steps="never", data=alike(), **ALIKE)
    through, calls = PlannedCalls._directly, []

    def wrong(self, direct, batch, index):
        calls.append(1)
        if len(calls) > 12:
            plan, right = direct.plan, type(direct.plan).__call__
            if not hasattr(plan, "spoilt"):
                plan.spoilt = True
                monkeypatch.setattr(type(plan), "__call__", lambda p, *inputs: spoil(p, right(p, *inputs)))
        return through(self, direct, batch, index)

    def spoil(plan, returned):
        plan.gradients = [g * 1.5 for g in plan.gradients]
        return returned

    monkeypatch.setattr(PlannedCalls, "_directly", wrong)
    with pytest.warns(UserWarning, match="is repeated without planned steps, because a gradient"):
        planned = fit(fresh(), 3, planned_steps="always", data=alike(), **ALIKE)
    assert torch.equal(weights(eager.module), weights(planned.module))


class BetweenClients(Callback):
    """Changes what steps read before every client."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        FACTOR["value"] += 0.25


@pytest.mark.filterwarnings("ignore:client 2 is left out")
def test_a_visit_that_broke_off_leaves_nothing_to_the_next(caplog):
    found, broken = [], blobs(600)
    broken.tensors[1][250] = 99  # a label beyond the last class
    for mode in ("never", "always"):
        FACTOR.update(value=1.0)
        data = fl.FederatedDataModule(broken, list(torch.arange(600).split(100)), batch_size=5, seed=0)
        options = {"on_client_error": "drop", "callbacks": [BetweenClients()], "local_epochs": 2}
        found.append(fit(fresh(Reads, log=True), 2, planned_steps=mode, data=data, clients_per_round=6, **options))
        assert found[-1].strategy.last_round.dropped
    agree(*found)
