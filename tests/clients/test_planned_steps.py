# SPDX-License-Identifier: Apache-2.0
"""Fits whose local steps come from plans: the same bits and logs."""

import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from planned_fits import OLD, agree, both, few_shapes, one_shape
from support import CLASSES, Classifier, fresh, train, weights

import fl_lightning as fl
from fl_lightning.algorithms.base import ClientRule
from fl_lightning.clients.planned.plan import Plan
from fl_lightning.clients.planned.planned_gradients import PlannedGradients

HERE = Path(__file__).parent
PLANNED = {
    "several passes": {"local_epochs": 2, "data": few_shapes()},
    "Adam": {"options": {"optimizer": "Adam", "lr": 0.01}},
    "BatchNorm": {"options": {"norm": True}},
    "dropout": {"options": {"dropout": 0.3}},
    "SCAFFOLD": {"algorithm": fl.algorithms.SCAFFOLD()},
    "Ditto": {"algorithm": fl.algorithms.Ditto()},
    "clipped values": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "options": {"momentum": 0.9}},
}


class LogsBefore(Classifier):
    """Logs what the rest of the step writes into."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("seen", torch.ones(2))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * 2
        self.log("loss", loss)
        self.log("seen", self.seen[1])
        self.seen.mul_(0.9)
        return loss.mul_(0.5 + self.seen.sum())


@pytest.mark.parametrize("case", PLANNED)
def test_the_same_bits_and_logs(case, caplog):
    eager, planned, said = both(caplog, **PLANNED[case])
    agree(eager, planned)
    if OLD and "norm" in PLANNED[case].get("options", {}):
        pytest.skip("steps with BatchNorm are not planned")
    assert all("planned" in message for message in said), said
    assert planned.strategy.last_round.planned_steps > 0


def test_what_is_logged_is_logged_at_once(caplog):
    eager, planned, said = both(caplog, LogsBefore)
    agree(eager, planned)
    assert all("planned" in message for message in said), said


class Shared(Classifier):
    """Two parameters whose gradients PyTorch computes as one tensor and a view of it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.second = torch.nn.Parameter(torch.zeros(6)), torch.nn.Parameter(torch.zeros(2, 3))

    def training_step(self, batch, batch_idx):
        total = self.first + self.second.view(6)
        return super().training_step(batch, batch_idx) + (total - torch.arange(6.0)).square().sum()


def test_gradients_that_share_memory_are_changed_once(caplog):
    eager, planned, said = both(caplog, Shared, gradient_clip_val=0.1, algorithm=fl.algorithms.SCAFFOLD())
    agree(eager, planned)
    assert all("planned" in message for message in said), said


UNPLANNED = {"MOON": fl.algorithms.MOON(), "FA": fl.algorithms.FA(torch.eye(12), sigma=4.0)}


@pytest.mark.parametrize("case", UNPLANNED)
def test_methods_that_plans_cannot_follow_stay_as_they_are(case, caplog):
    eager, planned, said = both(caplog, algorithm=UNPLANNED[case], options={"log": True})
    agree(eager, planned)
    assert planned.strategy.last_round.planned_steps > 0 or any("eager" in message for message in said), said


def test_worker_processes_plan_for_themselves(caplog):
    if torch.cuda.is_available():
        pytest.skip("worker processes are copies of this one, in which CUDA may have been used")
    executor = fl.executors.Parallel(workers=2)
    eager, planned, said = both(caplog, executor=executor)
    agree(eager, planned)
    assert planned.strategy.last_round.planned_steps > 0
    assert len(said) == len(set(said))
    alone = train(fresh(log=True), 2, data=one_shape())
    assert torch.equal(weights(planned.module), weights(alone.module))


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


def plan_in_workers():
    executor, rounds = InTurn(), Rounds()
    found = train(fresh(), 2, planned_steps=True, executor=executor, callbacks=[rounds], data=one_shape())
    assert min(rounds.planned) > 0
    assert executor.workers.fallback is None
    assert torch.equal(weights(found.module), weights(train(fresh(), 2, data=one_shape()).module))


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="a process that may have used a GPU cannot be copied")
def test_a_process_with_plans_makes_workers_that_plan(interpreter):
    """In one of its own: here a backward pass came before all tests."""
    program = "import test_planned_steps as here; here.plan_in_workers()"
    ended = interpreter(program, path=(HERE, *HERE.parents[:2]))
    assert ended.returncode == 0, ended.stderr


def test_nothing_is_left_of_a_plan_after_its_fit():
    train(fresh(log=True, norm=True), 1, planned_steps=True, data=one_shape())
    gc.collect()
    assert not [found for found in gc.get_objects() if issubclass(type(found), (Plan, PlannedGradients))]


def test_nothing_is_planned_unless_asked_for(caplog):
    with caplog.at_level("INFO"):
        found = train(rounds=1)
    assert found.strategy.last_round.planned_steps == 0
    assert any("Local steps: eager" in message for message in caplog.messages)
    with pytest.raises(TypeError, match="planned_steps"):
        fl.FederatedStrategy(planned_steps="always")


HOLDS = "the optimizer or the client rule may keep gradients, whose memory plans use again"


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
    eager, planned, said = both(caplog, client=KeepsGradients(), algorithm=fl.algorithms.FedAvg())
    agree(eager, planned)
    assert planned.strategy.last_round.planned_steps == 0
    assert said == [f"Local steps: eager from now on, because {HOLDS}"]


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
    eager, planned, said = both(caplog, OwnOptimizer)
    agree(eager, planned)
    assert planned.strategy.last_round.planned_steps == 0
    assert said == [f"Local steps: eager from now on, because {HOLDS}"]


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
        if self.current_epoch == 1:
            y = y + CLASSES  # beyond the last class
        return F.cross_entropy(self(x), y)


def test_errors_of_a_step_are_raised_as_ever():
    errors = []
    for mode in (False, True):
        with pytest.raises(RuntimeError, match="IndexError: Target 4 is out of bounds") as raised:
            train(fresh(Raises), planned_steps=mode, data=one_shape())
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
