# SPDX-License-Identifier: Apache-2.0
"""What Python reads and changes in a step: read anew for every batch, or a reason why there is no plan."""

from __future__ import annotations

import functools
import os
import random
from typing import ClassVar

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from planned_fits import OLD, OTHER_WORDS, SETS_DATA, agree, both
from support import Classifier, fit, fresh, weights

import fl_lightning as fl
from fl_lightning.algorithms.base import ClientRule
from fl_lightning.training.planned import plan, program

pytestmark = pytest.mark.fit


class Reads(Classifier):
    """Reads something that changes, and must not be planned with an old value."""

    what = "attribute"
    factor = 1.0
    table: ClassVar = {"factor": 1.0}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * getattr(self, self.what)(batch_idx)

    def attribute(self, index):
        return self.factor

    def class_table(self, index):
        return Reads.table["factor"]

    def epoch(self, index):
        return 1 + self.current_epoch

    def number_of_batch(self, index):
        return 2.0 if index % 2 else 1.0

    def environment(self, index):
        return float(os.environ.get("FL_LIGHTNING_TEST_FACTOR", "1"))

    def learning_rate(self, index):
        return self.trainer.optimizers[0].param_groups[0]["lr"]

    def tensor(self, index):
        return self.tensor_factor

    def on_train_epoch_start(self):
        self.factor = 1.0 + self.current_epoch
        Reads.table["factor"] = self.factor
        os.environ["FL_LIGHTNING_TEST_FACTOR"] = str(self.factor)
        self.tensor_factor = torch.tensor(self.factor)


@pytest.mark.parametrize(
    "what", ["attribute", "class_table", "epoch", "number_of_batch", "environment", "learning_rate", "tensor"]
)
def test_what_python_reads_is_read_anew(what, caplog, monkeypatch):
    monkeypatch.setenv("FL_LIGHTNING_TEST_FACTOR", "1")
    monkeypatch.setattr(Reads, "what", what)
    eager, planned, _ = both(caplog, Reads)
    agree(eager, planned)
    assert not torch.equal(weights(planned.module), weights(fit(fresh(log=True), planned_steps="never").module))


class Refused(Classifier):
    """Does something that a plan cannot repeat."""

    what = ""

    def __init__(self, **options):
        super().__init__(**options)
        self.history, self.count = [], 0
        self.accuracy = torchmetrics.MeanMetric()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("table", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        NUMBER["value"] = 0.0
        remembered.cache_clear()

    def training_step(self, batch, batch_idx):
        if self.what == "writes":
            batch[0].mul_(0.5)
        loss = super().training_step(batch, batch_idx)
        return getattr(self, self.what)(loss, batch)

    def item(self, loss, batch):
        self.log("item", loss.item())
        return loss

    def branch(self, loss, batch):
        return loss * 2 if loss > 1 else loss

    def counter(self, loss, batch):
        self.count += 1
        return loss

    def keeps(self, loss, batch):
        self.history.append(loss.detach())
        return loss

    def draws(self, loss, batch):
        return loss * random.random()

    def metric(self, loss, batch):
        self.accuracy(loss.detach())
        return loss

    def writes(self, loss, batch):
        return loss

    def skips(self, loss, batch):
        return None if len(batch[1]) < 10 else loss

    def prints(self, loss, batch):
        print("a step")
        return loss

    def moves(self, loss, batch):
        self.scale.data = self.scale.data + 1
        return loss * self.scale

    def turns(self, loss, batch):
        self.table.t_()
        return loss * self.table[0, 1]

    def looks_back(self, loss, batch):
        gradient = self.net[0].weight.grad
        return loss if gradient is None else loss * (1 + gradient.norm())

    def remembers(self, loss, batch):
        return loss * remembered(len(batch[1]))

    def on_train_epoch_start(self):
        NUMBER["value"] += 1.0


NUMBER = {"value": 0.0}


@functools.lru_cache
def remembered(size):
    """The number at the first call with this size."""
    return NUMBER["value"]


REASONS = {
    "item": "takes numbers out of tensors", "branch": "", "counter": "attribute 'count'", "keeps": "history",
    "draws": "Python's random", "metric": "", "writes": "its batch", "skips": "", "prints": "",
    "moves": "moves a tensor to other memory", "turns": "", "remembers": "remembered, which remembers",
    "looks_back": "it reads gradients",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.filterwarnings("ignore:.* trained nothing, because Refused.training_step")
@pytest.mark.parametrize("what", REASONS)
def test_what_a_plan_cannot_repeat_stays_as_it_is(what, caplog, monkeypatch):
    monkeypatch.setattr(Refused, "what", what)
    eager, planned, said = both(caplog, Refused)
    agree(eager, planned)
    assert planned.module.count == eager.module.count
    assert len(planned.module.history) == len(eager.module.history)
    reasons = [message for message in said if "eager from now on, because" in message]
    assert len(reasons) == 1
    assert OTHER_WORDS or REASONS[what] in reasons[0]
    assert "\n" not in reasons[0]


@pytest.mark.skipif(SETS_DATA, reason="an assignment to .data is set_ there, made when a program is written")
def test_memory_that_is_replaced_is_noticed_whatever_replaces_it(caplog, monkeypatch):
    monkeypatch.setattr(Refused, "what", "moves")
    monkeypatch.setattr(program, "_MOVING", ())
    eager, planned, said = both(caplog, Refused)
    agree(eager, planned)
    assert torch.equal(eager.module.scale, planned.module.scale)
    assert any("a buffer from a plan would differ" in message for message in said)


class Unchecked(Classifier):
    """Reads what TorchDynamo does not compare; it changes between the clients of a round, and comes back."""

    what = ""

    def __init__(self, **options):
        super().__init__(**options)
        self.listed, self.gathered = (("a", [1.0]),), ({1.0}, 2)

    def change_to(self, factor):
        self.listed[0][1][0] = factor
        self.gathered[0].clear()
        self.gathered[0].add(factor)
        os.environ.pop("FL_LIGHTNING_TEST_FACTOR", None)
        if factor != 1.0:
            os.environ["FL_LIGHTNING_TEST_FACTOR"] = str(factor)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * getattr(self, self.what)()

    def list_in_tuple(self):
        return self.listed[0][1][0]

    def set_in_tuple(self):
        return sum(self.gathered[0])

    def environment(self):
        return float(os.environ.get("FL_LIGHTNING_TEST_FACTOR", "1"))

    def environment_by_function(self):
        return float(os.getenv("FL_LIGHTNING_TEST_FACTOR", "1"))


class EverySecondClient(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.change_to(3.0 if batch_idx == 1 else 1.0)


@pytest.mark.parametrize("what", ["list_in_tuple", "set_in_tuple", "environment", "environment_by_function"])
def test_what_nobody_checks_is_not_planned(what, caplog, monkeypatch):
    monkeypatch.setenv("FL_LIGHTNING_TEST_FACTOR", "1")
    monkeypatch.setattr(Unchecked, "what", what)
    agree(*both(caplog, Unchecked, callbacks=[EverySecondClient()])[:2])


class Watched(Classifier):
    """Has a hook on a layer."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []
        self.net[0].register_forward_hook(lambda *_: self.seen.append(1))


def test_hooks_are_run(caplog):
    eager, planned, said = both(caplog, Watched)
    agree(eager, planned)
    assert len(planned.module.seen) == len(eager.module.seen) > 0
    assert said == ["Local steps: eager, because net.0 has hooks"]


class OwnLog(Classifier):
    """Its ``log`` changes what the rest of the step reads."""

    factor = 1.0

    def log(self, *args, **kwargs):
        super().log(*args, **kwargs)
        self.factor += 0.1

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.factor


def test_a_log_of_the_modules_own_is_called_in_the_step(caplog):
    eager, planned, said = both(caplog, OwnLog)
    agree(eager, planned)
    assert len(said) == 1
    assert "eager, because self.log is the module's own" in said[0]


class FreshTensor(ClientRule):
    """Gives the module another tensor for every batch."""

    def begin_batch(self, work, batch, batch_idx):
        self.kept = [*getattr(self, "kept", []), torch.ones(())]  # or the next would be in the memory of the last
        work.module.factor = self.kept[-1]


class Scaled(Classifier):
    factor = torch.ones(())

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.factor


def test_tensors_that_move_in_memory_end_planning(caplog):
    eager, planned, said = both(caplog, Scaled, client=FreshTensor(), algorithm=fl.algorithms.FedAvg(), rounds=4)
    agree(eager, planned)
    assert said[-1].endswith("because tensors that it reads lie elsewhere again and again")


@pytest.mark.skipif(OLD, reason="steps with BatchNorm are not planned")
def test_buffers_and_parameters_stay_where_they_are(caplog):
    *_, said = both(caplog, options={"norm": True}, rounds=8, client_optimizer_state="keep")
    assert all("planned" in message for message in said)


class Gathers(Classifier):
    """Keeps running values in tensors and arrays that are no buffers."""

    def __init__(self, **options):
        super().__init__(**options)
        self.mean, self.sums, self.seen = torch.zeros(()), [torch.zeros(2)], np.zeros(3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean.mul_(0.9).add_(loss.detach())
        self.sums[0][1] += loss.detach()
        self.seen[2] += len(batch[0])
        return loss / (1 + self.mean + self.sums[0][1])


def test_steps_that_compare_leave_nothing_in_tensors_that_are_no_buffers(caplog):
    eager, planned, said = both(caplog, Gathers)
    agree(eager, planned)
    assert planned.strategy.last_round.planned_steps > 0
    assert all("planned" in message for message in said)
    for name in ("mean", "sums", "seen"):
        assert repr(getattr(planned.module, name)) == repr(getattr(eager.module, name))


def test_what_cannot_be_written_down_stays_as_it_is(caplog, monkeypatch):
    """An operation that a program has no place for is found when parameters are where they train."""

    def refuse(*args, **kwargs):
        raise RuntimeError("no such variant\nand more")

    monkeypatch.setattr(plan, "program_of", refuse)
    eager, planned, said = both(caplog)
    agree(eager, planned)
    assert said == [
        "Local steps: eager from now on, because what is recorded cannot be written down: RuntimeError: no such variant"
    ]
