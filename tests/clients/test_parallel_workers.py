# SPDX-License-Identifier: Apache-2.0
"""What worker processes must not do unnoticed: fail, die, stay, or keep what belongs to the fit."""

import logging
import os
import signal
import threading
import time
import warnings
from functools import cache
from pathlib import Path

import lightning as L
import pytest
import torch
import torchmetrics
from resuming import Project, differences
from support import Classifier, blobs, fresh, train, weights
from torch import nn
from worker_processes import EXECUTORS, FORKS, HERE, TWO, Failing, compared

import fl_lightning as fl
from fl_lightning.algorithms import ClientRule
from fl_lightning.core.storage.declared import server_state

pytestmark = FORKS


def fit_in_workers(module=None, rounds=2, **options):
    """A fit in two processes; the last client of a round waits for one that is done."""
    return train(module, rounds, **{"clients_per_round": 5, "executor": TWO, **options})


class Measuring(Classifier):
    """A metric that wraps another one is updated and logged."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = torchmetrics.RunningMean(window=3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen(loss.detach())
        self.log("seen", self.seen)
        return loss


class Iterating(Classifier):
    """An iterator runs on from client to client: nothing can turn it back."""

    def __init__(self, **options):
        super().__init__(**options)
        self.numbers = iter([1.0, 1.1, 0.9] * 100)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * next(self.numbers)


def test_metrics_that_wrap_others_are_carried(tmp_path):
    compared(tmp_path, Measuring)


def test_clients_train_in_turn_where_something_runs_on_from_one_to_the_next(tmp_path, caplog):
    reason = "attribute 'numbers' (list_iterator) cannot be put back after a client"
    with caplog.at_level(logging.INFO):
        compared(tmp_path, Iterating, fallback=reason)
    said = [r.getMessage() for r in caplog.records if " trains this fit's clients one after" in r.getMessage()]
    assert [words.endswith(reason) for words in said] == [True, True]


class Counting(ClientRule):
    """Keeps something for commit and does not say so."""

    def commit(self, cohort):
        pass


class Between(L.Callback):
    def on_train_batch_end(self, *_):
        pass


class Watching(L.Callback):
    def on_before_backward(self, trainer, module, loss):
        pass


OBSTACLES = {
    "rule": ({"client": Counting()}, {}, "Counting has a commit and declares nothing that it keeps"),
    "callback": ({}, {"callbacks": [Watching()]}, "Watching.on_before_backward would run in worker processes"),
    "between": ({}, {"callbacks": [Between()]}, "would not see what Between does between two clients"),
    "profiler": ({}, {"profiler": "simple"}, "Trainer(profiler=SimpleProfiler) would not see"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_obstacles_are_said_before_the_first_round(caplog, name):
    options, trainer, reason = OBSTACLES[name]
    with caplog.at_level(logging.INFO):
        found = [fit_in_workers(rounds=1, executor=each, **trainer, **options).strategy for each in (TWO, HERE)]
    assert all(reason in strategy.executor_fallback for strategy in found)
    assert sum(reason in record.getMessage() for record in caplog.records) == 2


def test_copies_that_cannot_train_are_given_up(monkeypatch):
    monkeypatch.setattr("fl_lightning.clients.parallel.can_train", lambda: "autograd does not survive forks")
    module, alone = fresh(), fresh()
    strategy = fit_in_workers(module).strategy
    fit_in_workers(alone, executor=None)
    assert strategy.executor_fallback == "worker processes cannot train here (autograd does not survive forks)"
    assert torch.equal(weights(module), weights(alone))


def test_a_process_that_has_used_cuda_is_not_copied(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    strategy = fit_in_workers(rounds=1).strategy
    assert strategy.executor_fallback == "this process has used CUDA, which copies of it cannot use again"


def test_rules_that_say_what_they_keep_are_no_obstacle():
    class Keeping(fl.algorithms.SCAFFOLD().client_rule().__class__):
        def commit(self, cohort):
            super().commit(cohort)

    class Telling(Keeping):
        rounds = server_state(0)

    keeping, telling = Keeping(weighting="samples"), Telling(weighting="samples")
    assert "declares nothing that it keeps" in fit_in_workers(rounds=1, client=keeping).strategy.executor_fallback
    assert fit_in_workers(rounds=1, client=telling).strategy.executor_fallback is None


class Moving(Classifier):
    def __init__(self, in_one, **options):
        super().__init__(**options)
        self.frozen, self.in_one = nn.Parameter(torch.zeros(3), requires_grad=False), in_one

    def training_step(self, batch, batch_idx):
        if not self.in_one or comes_first(os.getpid()):
            self.frozen.data.add_(1)
            time.sleep(0.02)  # the other worker takes clients, too
        else:
            time.sleep(0.1)  # and its round ends later
        return super().training_step(batch, batch_idx)


@cache
def comes_first(process):
    try:
        os.close(os.open("taken", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@pytest.mark.parametrize(("in_one", "executor"), [(False, TWO), (True, TWO), (False, HERE)])
def test_frozen_parameters_that_change_in_a_worker_are_named(in_one, executor):
    with pytest.raises(
        ValueError, match=r"in no optimizer, must not change in local training, found changes in 'frozen'"
    ):
        fit_in_workers(fresh(Moving, in_one=in_one), executor=executor)


class Scaled(Classifier):
    """Its outputs are multiplied by a parameter without gradients."""

    def __init__(self, **options):
        super().__init__(**options)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x):
        return super().forward(x) * self.scale


def _scale_in_place(module):
    with torch.no_grad():
        module.scale.add_(1)


def _scale_anew(module):
    module.scale = nn.Parameter(module.scale + 1, requires_grad=False)


def _another_activation(module):
    module.net[1] = {nn.ReLU: nn.Sigmoid, nn.Sigmoid: nn.Tanh, nn.Tanh: nn.Sigmoid}[type(module.net[1])]()


@pytest.mark.parametrize("change", [_scale_in_place, _scale_anew, _another_activation])
def test_frozen_parameters_and_submodules_that_change_between_rounds_reach_workers(change):
    class Changing(L.Callback):
        def on_train_epoch_end(self, trainer, module):
            change(module)

    found = []
    for executor in EXECUTORS:
        module = fresh(Scaled)
        strategy = fit_in_workers(module, 3, callbacks=[Changing()], executor=executor).strategy
        found.append(weights(module))
        assert strategy.executor_fallback is None
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# ---- failures


REASONS = {
    "raise": r"client \d+ in round 1: ArithmeticError: no such batch",
    "unpicklable": r"client \d+ in round 1: .*LocalError: cannot travel",
    "exit": r"client \d+ in round 1: .*its worker process ended with exit code 3",
    "kill": r"client \d+ in round 1: .*its worker process was killed by SIGKILL",
}


@pytest.mark.parametrize(
    ("how", "executor"), [*((how, TWO) for how in REASONS), ("raise", HERE), ("unpicklable", HERE)]
)
def test_a_failure_names_the_client_and_leaves_the_global_model(how, executor):
    whole = fresh()
    fit_in_workers(whole, 1, executor=None)
    module = fresh(Failing, how=how)
    with pytest.raises(fl.ClientError, match=REASONS[how]) as caught:
        fit_in_workers(module, executor=executor)
    assert torch.equal(weights(module), weights(whole))  # as after round 0
    if how == "raise":
        assert isinstance(caught.value.__cause__, ArithmeticError)
        assert "in training_step" in str(caught.value.__cause__.__cause__)


def test_clients_that_raise_are_dropped_as_in_sequence(tmp_path):
    outcomes = []
    for executor in EXECUTORS:
        strategy = {"executor": executor, "clients_per_round": 5, "on_client_error": "drop"}
        with pytest.warns(UserWarning, match="is left out of round 1: ArithmeticError: no such batch"):
            outcomes.append(Project(module=Failing, options={"log": True}, strategy=strategy, rounds=3).fit(tmp_path))
    for outcome in outcomes[1:]:
        assert not differences(outcomes[0].state, outcome.state)
        assert not differences(outcomes[0].rows, outcome.rows)


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_clients_whose_worker_dies_are_dropped_and_the_others_are_trained(how):
    with pytest.warns(UserWarning, match=r"client \d+ is left out of round 1: .*its worker process"):
        _, strategy, trainer = fit_in_workers(fresh(Failing, how=how), 3, on_client_error="drop")
    assert trainer.current_epoch == 3
    assert len(strategy.last_round.client_ids) == 5
    assert strategy.executor_fallback is None


def test_the_client_that_waits_behind_one_whose_worker_dies_is_trained_by_another():
    class Dying(Classifier):
        def training_step(self, batch, batch_idx):
            try:
                os.close(os.open("died", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return super().training_step(batch, batch_idx)
            os._exit(3)

    one = fl.executors.Parallel(workers=1)
    with pytest.warns(UserWarning, match=r"is left out of round 0: .*ended with exit code 3"):
        strategy = fit_in_workers(fresh(Dying), 1, executor=one, on_client_error="drop").strategy
    assert len(strategy.last_round.client_ids) == 4


def test_clients_without_data_are_dropped_as_in_sequence():
    found = []
    for executor in EXECUTORS:
        indices = [[], list(range(60)), list(range(60, 100)), [], list(range(100, 240))]
        data = fl.FederatedDataModule(blobs(240), indices, batch_size=10)
        with pytest.warns(UserWarning, match="it has no training data"):
            module, strategy, _ = fit_in_workers(fresh(), data=data, on_client_error="drop", executor=executor)
        assert {*strategy.last_round.dropped} == {0, 3}
        assert strategy.executor_fallback is None
        found.append(weights(module))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


class Warns(Classifier):
    def training_step(self, batch, batch_idx):
        warnings.warn("a batch is odd", RuntimeWarning, stacklevel=1)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("executor", [TWO, HERE])
def test_warnings_of_workers_arrive_once(executor):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        fit_in_workers(fresh(Warns), 3, executor=executor)
    found = [warning for warning in caught if str(warning.message) == "a batch is odd"]
    assert {warning.filename for warning in found} == {__file__}
    assert len(found) == 1 or executor is HERE  # whose visits are fits in this process, which begin to show them anew


# ---- the end of the parent


class Slow(Classifier):
    def training_step(self, batch, batch_idx):
        Path(f"started-{os.getpid()}").touch()
        time.sleep(100)


def started(number: int) -> list[int]:
    """Waits until that many workers train."""
    for _ in range(1000):
        workers = [int(path.name.partition("-")[2]) for path in Path.cwd().glob("started-*")]
        if len(workers) == number:
            return workers
        time.sleep(0.02)
    pytest.fail("workers do not start")


def gone(pid: int) -> bool:
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_an_interrupted_fit_leaves_no_worker():
    def interrupt():
        found.extend(started(2))
        os.kill(os.getpid(), signal.SIGINT)

    found: list[int] = []
    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what runs behind it
    try:
        thread.start()
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit_in_workers(fresh(Slow))
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert os.getpid() not in found
    assert all(map(gone, found))


def test_workers_do_not_outlive_a_killed_fit():
    pid = os.fork()
    if pid == 0:
        try:
            fit_in_workers(fresh(Slow))
        finally:
            os._exit(1)
    workers = started(2)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert all(map(gone, workers))
