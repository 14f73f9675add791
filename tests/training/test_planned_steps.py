# SPDX-License-Identifier: Apache-2.0
"""Fits whose local steps come from plans: the same bits, or a reason why there is no plan."""

from __future__ import annotations

import os
import random
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import Callback
from support import CLASSES, Blobs, Classifier, fit, fresh, weights

import fl_lightning as fl
from fl_lightning.algorithms.base import ClientRule

pytestmark = pytest.mark.fit


def both(caplog, module=Classifier, rounds=3, options=None, **strategy):
    """The same fit without plans and with them, and what the second one said about its steps."""
    options = {"log": True, **(options or {})}
    eager = fit(fresh(module, **options), rounds, planned_steps="never", **strategy)
    caplog.clear()
    with caplog.at_level("INFO"):
        planned = fit(fresh(module, **options), rounds, planned_steps="always", **strategy)
    return eager, planned, [m for m in caplog.messages if m.startswith("Local steps")]


def agree(eager, planned):
    """Weights, buffers and all that was logged, wall-clock times apart."""
    assert torch.equal(weights(eager.module), weights(planned.module))
    logged, other = (dict(f.trainer.callback_metrics) for f in (eager, planned))
    logged.pop("fed/seconds"), other.pop("fed/seconds")
    assert logged.keys() == other.keys()
    for name, value in logged.items():
        assert torch.equal(value, other[name]) or value != value, name
    assert eager.strategy.last_round.planned_steps == 0


PLANNED = {
    "SGD": {},
    "several passes": {"local_epochs": 3},
    "momentum": {"options": {"momentum": 0.9}},
    "momentum, kept": {"options": {"momentum": 0.9}, "client_optimizer_state": "keep"},
    "Adam": {"options": {"optimizer": "Adam", "lr": 0.01}},
    "BatchNorm": {"options": {"norm": True}},
    "dropout": {"options": {"dropout": 0.3}},
    "global buffers": {"options": {"norm": True}, "buffers": "global"},
    "FedProx": {"algorithm": fl.algorithms.FedProx(mu=0.1)},
    "SCAFFOLD": {"algorithm": fl.algorithms.SCAFFOLD()},
    "FedDyn": {"algorithm": fl.algorithms.FedDyn()},
    "Ditto": {"algorithm": fl.algorithms.Ditto()},
    "FedLF": {"algorithm": fl.algorithms.FedLF()},
    "FedHEAL": {"algorithm": fl.algorithms.FedHEAL()},
    "an attack": {"attack": fl.attacks.ZeroUpdates(clients=(1, 2))},
}


@pytest.mark.parametrize("case", PLANNED)
def test_the_same_bits_and_logs(case, caplog):
    eager, planned, said = both(caplog, **PLANNED[case])
    agree(eager, planned)
    assert all("planned" in message for message in said), said
    assert planned.strategy.last_round.planned_steps > 0


UNPLANNED = {
    "MOON": fl.algorithms.MOON(),
    "FedProto": fl.algorithms.FedProto(),
    "FedProc": fl.algorithms.FedProc(),
    "FA": fl.algorithms.FA(torch.eye(12), sigma=4.0),
}


@pytest.mark.parametrize("case", UNPLANNED)
def test_methods_that_plans_cannot_follow_stay_as_they_are(case, caplog):
    eager, planned, said = both(caplog, algorithm=UNPLANNED[case], options={"log": True})
    agree(eager, planned)
    assert planned.strategy.last_round.planned_steps > 0 or any("eager" in message for message in said), said


def test_worker_processes_plan_for_themselves(caplog):
    if torch.cuda.is_available():
        pytest.skip("worker processes are copies of this one, in which CUDA may have been used")
    executor = fl.executors.Parallel(workers=2)
    eager, planned, said = both(caplog, executor=executor, rounds=4)
    agree(eager, planned)
    assert planned.strategy.last_round.planned_steps > 0
    assert len(said) == len(set(said))
    assert torch.equal(weights(planned.module), weights(fit(fresh(log=True), 4, planned_steps="always").module))


class Rounds(Callback):
    """Notes how many steps of each round came from plans."""

    def __init__(self):
        self.planned = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.planned.append(trainer.strategy.last_round.planned_steps)


class InTurn(fl.executors.Sequential):
    """Trains the first round in this process and all others in workers."""

    def runner(self, clients):
        workers, here = fl.executors.Parallel(2).runner(clients), super().runner(clients)
        begun = []

        class Both(type(here)):
            def begin_round(self, tasks):
                begun.append(tasks)
                workers.begin_round(tasks)

            def train(self, task):
                return (here if len(begun) == 1 else workers).train(task)

            def end_round(self):
                return here.end_round() if len(begun) == 1 else workers.end_round()

            def close(self):
                workers.close()

        self.workers = workers
        return Both(clients)

    def rows(self, number, like):
        return fl.executors.Parallel(2).rows(number, like)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process that may have used a GPU cannot be copied")
def test_a_process_that_makes_workers_plans_nothing_itself():
    executor, rounds = InTurn(), Rounds()
    found = fit(fresh(), 3, planned_steps="always", executor=executor, callbacks=[rounds])
    assert rounds.planned[0] == 0
    assert executor.workers.fallback is None
    assert found.strategy.last_round.planned_steps > 0
    assert torch.equal(weights(found.module), weights(fit(fresh(), 3, planned_steps="never").module))


def test_auto_waits(caplog):
    with caplog.at_level("INFO"):
        found = fit(rounds=2)
    assert found.strategy.last_round.planned_steps == 0
    assert any("planned where they can be, after 256 batches of a shape" in message for message in caplog.messages)
    assert not any(message.startswith("Local steps: planned for") for message in caplog.messages)


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


REASONS = {
    "item": "takes numbers out of tensors", "branch": "", "counter": "attribute 'count'", "keeps": "history",
    "draws": "Python's random", "metric": "", "writes": "its batch", "skips": "", "prints": "",
}  # fmt: skip


@pytest.mark.parametrize("what", REASONS)
def test_what_a_plan_cannot_repeat_stays_as_it_is(what, caplog, monkeypatch):
    monkeypatch.setattr(Refused, "what", what)
    eager, planned, said = both(caplog, Refused)
    agree(eager, planned)
    assert planned.module.count == eager.module.count
    assert len(planned.module.history) == len(eager.module.history)
    reasons = [message for message in said if "eager from now on, because" in message]
    assert len(reasons) == 1
    assert REASONS[what] in reasons[0]
    assert "\n" not in reasons[0]


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


class KeepsGradients(ClientRule):
    """Follows the mean of the last two gradients: it holds on to tensors."""

    def begin_client(self, work):
        self.before = [None for _ in work.parameters]

    def correct_gradients(self, work):
        now = [parameter.grad for parameter in work.parameters]
        for parameter, old in zip(work.parameters, self.before, strict=True):
            if old is not None:
                parameter.grad = (parameter.grad + old) / 2
        self.before = now


def test_a_rule_may_hold_on_to_gradients(caplog):
    eager, planned, _ = both(caplog, client=KeepsGradients(), algorithm=fl.algorithms.FedAvg())
    agree(eager, planned)
    assert planned.strategy.last_round.planned_steps > 0


class Lookahead(torch.optim.SGD):
    """An optimizer of somebody's own that holds on to gradients."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                old = self.state[parameter].get("old")
                self.state[parameter]["old"] = parameter.grad
                with torch.no_grad():
                    parameter -= group["lr"] * (parameter.grad if old is None else (parameter.grad + old) / 2)


class OwnOptimizer(Classifier):
    def configure_optimizers(self):
        return Lookahead(self.parameters(), lr=0.1)


def test_an_optimizer_may_hold_on_to_gradients(caplog):
    eager, planned, _ = both(caplog, OwnOptimizer)
    agree(eager, planned)
    assert planned.strategy.last_round.planned_steps > 0


class Frozen(Classifier):
    """A layer without gradients, and a parameter that the loss does not depend on."""

    def __init__(self, **options):
        super().__init__(**options)
        self.net[0].weight.requires_grad_(False)
        self.spare = torch.nn.Parameter(torch.ones(3))


def test_frozen_and_unused_parameters(caplog):
    eager, planned, _ = both(caplog, Frozen)
    agree(eager, planned)
    assert planned.strategy.last_round.planned_steps > 0
    assert torch.equal(planned.module.spare, torch.ones(3))


class Raises(Classifier):
    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.current_epoch == 2:
            y = y + CLASSES  # beyond the last class
        return F.cross_entropy(self(x), y)


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


def test_buffers_and_parameters_stay_where_they_are(caplog):
    *_, said = both(caplog, options={"norm": True}, rounds=8, client_optimizer_state="keep")
    assert all("planned" in message for message in said)


def test_errors_of_a_step_are_raised_as_ever():
    errors = []
    for mode in ("never", "always"):
        with pytest.raises(RuntimeError, match="IndexError: Target 5 is out of bounds") as raised:
            fit(fresh(Raises), planned_steps=mode)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_at_most_eight_shapes_are_planned(caplog):
    data = fl.FederatedDataModule(
        torch.utils.data.TensorDataset(torch.randn(300, 12), torch.randint(0, CLASSES, (300,))),
        list(torch.arange(300).split([*range(11, 23), 300 - sum(range(11, 23))])), batch_size=50,
    )  # fmt: skip
    eager, planned, said = both(caplog, data=data, clients_per_round=13)
    agree(eager, planned)
    assert len(said) == 8


class OwnLoss(Classifier):
    def federated_loss(self, batch, batch_idx):
        x, y = batch
        return {"loss": F.cross_entropy(self(x), y, label_smoothing=0.1)}


@pytest.mark.parametrize("module", [Classifier, OwnLoss])
def test_losses_at_the_global_model_come_from_plans(module, caplog):
    eager = fit(fresh(module, norm=True), algorithm=fl.algorithms.FedLF(), planned_steps="never")
    with caplog.at_level("INFO"):
        planned = fit(fresh(module, norm=True), algorithm=fl.algorithms.FedLF(), planned_steps="always")
    agree(eager, planned)
    assert torch.equal(eager.strategy.last_round.losses, planned.strategy.last_round.losses)
    assert any(message.startswith("Losses: planned for") for message in caplog.messages)


# ---- what happens if a plan is wrong after all


def broken_after(steps, monkeypatch):
    """Lets plans give other gradients from some step on."""
    from fl_lightning.training.planned.plan import Plan

    right, calls = Plan.__call__, []

    def wrong(self, *inputs):
        calls.append(1)
        returned = right(self, *inputs)
        if len(calls) > steps:
            self.gradients = [None if g is None else g * 1.5 for g in self.gradients]
        return returned

    monkeypatch.setattr(Plan, "__call__", wrong)


REPEATED = {
    "SGD": ({}, {}),
    "SCAFFOLD": ({"algorithm": fl.algorithms.SCAFFOLD()}, {}),
    "momentum and BatchNorm": ({}, {"norm": True, "momentum": 0.9}),
}


@pytest.mark.parametrize("case", REPEATED)
def test_a_round_with_wrong_plans_is_repeated_without(case, caplog, monkeypatch):
    strategy, options = REPEATED[case]
    options, kept = {"log": True, **options}, {"client_optimizer_state": "keep", **strategy}
    eager = fit(fresh(**options), 4, planned_steps="never", **kept)
    broken_after(30, monkeypatch)
    with (
        caplog.at_level("INFO"),
        pytest.warns(UserWarning, match="is repeated without planned steps, because a gradient"),
    ):
        planned = fit(fresh(**options), 4, planned_steps="always", **kept)
    assert torch.equal(weights(eager.module), weights(planned.module))
    assert planned.strategy.last_round.planned_steps == 0
    assert sum("eager from now on" in message for message in caplog.messages) == 1


def test_the_end_of_a_round_finds_what_no_first_step_shows(monkeypatch):
    """All batches have one shape, so after the first step of the fit no plan is new."""

    def alike():
        return fl.FederatedDataModule(Blobs(), fl.data.IID(6), seed=0)

    eager = fit(fresh(), 4, planned_steps="never", data=alike())
    broken_after(20, monkeypatch)
    with pytest.warns(UserWarning, match="Round 1 is repeated without planned steps, because a gradient"):
        planned = fit(fresh(), 4, planned_steps="always", data=alike())
    assert torch.equal(weights(eager.module), weights(planned.module))


def test_a_round_with_wrong_plans_in_workers_is_repeated_without(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("worker processes are copies of this one, in which CUDA may have been used")
    eager = fit(fresh(), 4, planned_steps="never")
    broken_after(20, monkeypatch)
    with pytest.warns(UserWarning, match="is repeated without planned steps, because a gradient"):
        planned = fit(fresh(), 4, planned_steps="always", executor=fl.executors.Parallel(workers=2))
    assert torch.equal(weights(eager.module), weights(planned.module))


def test_a_plan_that_is_wrong_from_the_start_is_never_used(caplog, monkeypatch, recwarn):
    broken_after(0, monkeypatch)
    eager, planned, said = both(caplog)
    assert not any("is repeated" in str(warning.message) for warning in recwarn)
    agree(eager, planned)
    assert said == ["Local steps: eager from now on, because a gradient from a plan would differ from PyTorch's"]
