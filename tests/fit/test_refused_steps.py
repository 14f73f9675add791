# SPDX-License-Identifier: Apache-2.0
"""A step after which something would not be finite is not taken, and a fit that gets nowhere stops."""

from __future__ import annotations

import copy
import math
from functools import partial

import lightning as L
import pytest
import torch
from resuming import ALGORITHMS, differences
from support import Classifier, federated_blobs, fresh, quiet_trainer, weights

import fl_lightning as fl
from fl_lightning import optim
from fl_lightning.algorithms import FedAvg
from fl_lightning.algorithms.attacks import Attack
from fl_lightning.data import CohortSampler, Selection

pytestmark = [
    pytest.mark.filterwarnings("ignore:client .* is left out of round"),
    pytest.mark.filterwarnings("ignore:round .* (had no usable report|was left out)"),
]
BAD = 2
COUNTERS = ("fit", "skipped_rounds", "failed_rounds")


class Huge(Attack):
    """One client's update is finite and far too long, in some rounds."""

    def __init__(self, factor=1e30):
        self.factor, self.clients = factor, (BAD,)

    def replace(self, update, params, seed):
        update.mul_(self.factor)


class Everybody(CohortSampler):
    def select(self, round, cohort_size, sizes, seed):  # noqa: A002
        return Selection(tuple(range(cohort_size)))


class Watch(L.Callback):
    """Keeps weights, buffers and everything that is remembered, after every round."""

    def __init__(self):
        self.seen, self.records = [], []

    def on_train_epoch_end(self, trainer, module):
        states = {k: v for k, v in trainer.strategy._fits.states().items() if k not in COUNTERS}
        self.seen.append(copy.deepcopy({"weights": weights(module), **states}))
        self.records.append(trainer.strategy.last_round)


def run(rounds=1, module=Classifier, trainer=None, ckpt_path=None, rule=None, **options):
    watch = Watch()
    defaults = {"clients_per_round": 4, "sampler": Everybody(), "seed": 3, "on_client_error": "drop"}
    strategy = fl.FederatedStrategy(FedAvg() if rule is None else rule, **{**defaults, **options})
    fitted = quiet_trainer(strategy, rounds, callbacks=[watch], **(trainer or {}))
    fitted.module = fresh(module)
    fitted.watch, fitted.start = watch, weights(fitted.module)
    fitted.fit(fitted.module, federated_blobs(), ckpt_path=ckpt_path)
    return fitted


OPTIMIZERS = {
    "FedAdam": partial(optim.FedAdam, lr=0.1),
    "FedYogi": partial(optim.FedYogi, lr=0.1),
    "FedAdagrad": partial(optim.FedAdagrad, lr=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=1e12, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_huge_update_reaches_neither_the_model_nor_the_server_optimizer(name):
    with pytest.warns(UserWarning, match=rf"round 0 was left out: .* largest norms of updates are client {BAD} \d"):
        trainer = run(server_optimizer=OPTIMIZERS[name], attack=Huge())
    assert torch.equal(weights(trainer.module), trainer.start)
    assert not trainer.watch.seen[0]["server_optimizer"]["state"]
    record = trainer.watch.records[0]
    assert record.client_ids == ()
    assert "would not be finite" in record.skipped
    assert set(record.dropped) == {0, 1, 2, 3}
    with pytest.raises(
        fl.ClientError, match=rf"^round 0: .* would not be finite.*; the largest norms of updates are client {BAD} \d"
    ):
        run(server_optimizer=OPTIMIZERS[name], attack=Huge(), on_client_error="raise")


class Idle(Classifier):
    """Trains with any weights, and stays where it is."""

    def training_step(self, batch, batch_idx):
        return sum((p * 0).sum() for p in self.parameters())


class Runaway(FedAvg):
    """Moves every parameter by more than half of the largest number."""

    def aggregate(self, cohort):
        return super().aggregate(cohort) * 0 + 2e38


def test_a_step_beyond_the_largest_number_is_not_taken():
    once = run(1, Idle, {"limit_val_batches": 0}, rule=Runaway())
    assert float(once.watch.seen[0]["weights"].max()) < -1e38
    with pytest.warns(UserWarning, match=r"round 1 was left out: the global parameters would not be finite"):
        twice = run(2, Idle, {"limit_val_batches": 0}, rule=Runaway())
    assert torch.equal(weights(twice.module), weights(once.module))


class OneNaN(torch.optim.SGD):
    """Goes wrong in its second step, and has state."""

    def __init__(self, params):
        super().__init__(params, lr=1.0, momentum=0.9)
        self.calls = 0

    def step(self, closure=None):
        super().step(closure)
        self.calls += 1
        if self.calls == 2:
            self.param_groups[0]["lr"] = math.nan
            self.param_groups[0]["params"][0].data[0] = math.nan


# Some refuse server optimizers, which are what goes wrong here.
@pytest.mark.parametrize("name", [name for name, rule in ALGORITHMS.items() if not rule().needs.exact_step])
def test_a_refused_round_leaves_no_trace_in_any_method(name):
    rule = ALGORITHMS[name]()
    keeps = "reset" if rule.needs.full_gradients else "keep"
    module = partial(Classifier, momentum=0.0 if name == "FedCKA" else 0.9, norm=True)
    with pytest.warns(UserWarning, match="round 1 was left out: the global parameters would not be finite after"):
        trainer = run(
            3, module, {"limit_val_batches": 0}, rule=rule, server_optimizer=OneNaN, client_optimizer_state=keeps
        )
    seen = trainer.watch.seen
    assert not differences(seen[0], seen[1])
    assert differences(seen[1], seen[2])
    assert [record.skipped is None for record in trainer.watch.records] == [True, False, True]
    assert [record.skipped_rounds for record in trainer.watch.records] == [0, 1, 1]


# ---- rounds that come to nothing


class Failing(Classifier):
    """Every client fails in some rounds."""

    rounds: tuple[int, ...] = ()

    def training_step(self, batch, batch_idx):
        if self.current_epoch in self.rounds:
            raise RuntimeError("maintenance")
        return super().training_step(batch, batch_idx)


def failing_in(*rounds):
    return type("Failing", (Failing,), {"rounds": rounds})


def test_a_fit_stops_after_three_rounds_without_a_usable_report():
    with pytest.raises(
        fl.ClientError,
        match=r"^3 rounds in a row changed nothing although clients trained, up to round 3, which had no usable report "
        r"\(client 0: RuntimeError: maintenance; client 1: .*max_failed_rounds=3",
    ):
        run(9, failing_in(1, 2, 3))


def test_it_stops_where_steps_are_refused():
    with pytest.raises(fl.ClientError, match=r"^2 rounds in a row .* which was left out: .*largest norms.* client 2"):
        run(9, server_optimizer=OPTIMIZERS["FedAdam"], attack=Huge(), max_failed_rounds=2)


def test_weights_that_break_every_client_stop_the_fit():
    with pytest.raises(fl.ClientError, match=r"3 rounds in a row .*client 0: its (update|training loss) is (not|nan)"):
        run(9, trainer={"limit_val_batches": 0}, attack=Huge(1e36))


def test_only_failures_in_a_row_count():
    assert run(6, failing_in(0, 1, 3, 4)).current_epoch == 6
    assert run(5, failing_in(0, 1, 2, 3), max_failed_rounds=None).current_epoch == 5
    with pytest.raises(fl.ClientError, match=r"^1 round in a row"):
        run(5, failing_in(2), max_failed_rounds=1)


def test_rounds_in_which_nobody_trains_are_no_failures():
    class Away(CohortSampler):
        def select(self, round, cohort_size, sizes, seed):  # noqa: A002
            clients = tuple(range(cohort_size))
            return Selection(clients, clients if round > 0 else ())

    assert run(6, sampler=Away()).current_epoch == 6


def test_a_resumed_fit_goes_on_counting(tmp_path):
    first = run(3, failing_in(1, 2))
    first.save_checkpoint(tmp_path / "two.ckpt")
    with pytest.raises(fl.ClientError, match=r"^3 rounds in a row .* up to round 3"):
        run(6, failing_in(3), ckpt_path=tmp_path / "two.ckpt")
    assert run(6, failing_in(4, 5), ckpt_path=tmp_path / "two.ckpt").current_epoch == 6
