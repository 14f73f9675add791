# SPDX-License-Identifier: Apache-2.0
"""A round that does not count changes nothing, and is counted and named; a fit that gets nowhere stops."""

import math
from functools import partial

import pytest
import torch
from cases import in_turn
from resuming import ALGORITHMS, differences
from support import Classifier, fresh, place_of_client, train, weights
from watching import States

import fl_lightning as fl
from fl_lightning import optim
from fl_lightning.algorithms import FedAvg
from fl_lightning.algorithms.attacks import Attack
from fl_lightning.data import CohortSampler, Selection

pytestmark = pytest.mark.filterwarnings(
    "ignore:client .* is left out of round", "ignore:round .* (usable report|was left out)"
)
BAD, POOR = 2, 1


class Gone(CohortSampler):
    """The first clients, of whom some vanish: in round 1, or from then on."""

    def __init__(self, *gone, for_good=False):
        self.gone, self.for_good = gone, for_good

    def select(self, round, cohort_size, sizes, seed):  # noqa: A002
        away = round >= POOR if self.for_good else round == POOR
        return Selection(tuple(range(cohort_size)), self.gone if away else ())


def run(rounds=3, method=FedAvg, module=Classifier, **options):
    """A fit of four clients that remembers all that its method allows, and its states."""
    rule, states = method(), States()
    defaults = {"clients_per_round": 4, "sampler": Gone(), "seed": 3, "on_client_error": "drop"}
    if not rule.needs.full_gradients:
        defaults["client_optimizer_state"] = "keep"
    if not rule.needs.exact_step:
        defaults["server_optimizer"] = partial(torch.optim.SGD, lr=1.0, momentum=0.9)
    module = fresh(module, momentum=0.0 if method is ALGORITHMS["FedCKA"] else 0.9, norm=True)
    return states, train(module, rounds, algorithm=rule, callbacks=[states], **{**defaults, **options})


class Failing(Classifier):
    """Clients at some places fail in some rounds."""

    rounds, places = (POOR,), (1, 2)

    def training_step(self, batch, batch_idx):
        if self.current_epoch in self.rounds and place_of_client(self.trainer) in self.places:
            raise RuntimeError("maintenance")
        return super().training_step(batch, batch_idx)


def failing_in(*rounds):
    return type("AllFail", (Failing,), {"rounds": rounds, "places": range(4)})


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


FEW = "2 usable reports, fewer than min_clients=3"
CAUSES = {
    "few arrive": ({"sampler": Gone(1, 3), "min_clients": 3}, FEW),
    "clients fail": ({"module": Failing, "min_clients": 3}, FEW),
    "nobody arrives": ({"sampler": Gone(0, 1, 2, 3)}, "no usable report"),
    "few arrive in processes": ({"sampler": Gone(1, 3), "min_clients": 3, "executor": fl.executors.Parallel(2)}, FEW),
    "the step": ({"server_optimizer": OneNaN}, "the global parameters would not be finite"),
}
# What is kept: nothing, at the server, by client at the server, at clients, a history; full gradients.
KINDS = ("FedAvg", "AFL", "SCAFFOLD", "Ditto", "FedLF", "FCFL")
TAKEN_BACK = [name for name, rule in ALGORITHMS.items() if not rule().needs.exact_step]


@pytest.mark.parametrize(
    ("name", "cause"), in_turn(KINDS, list(CAUSES)[:3]) + in_turn(("SCAFFOLD",), list(CAUSES)[3:4])
    + in_turn(TAKEN_BACK, ["the step"]),
)  # fmt: skip
def test_a_round_that_does_not_count_leaves_no_trace(name, cause):
    options, why = CAUSES[cause]
    states, done = run(method=ALGORITHMS[name], **options)
    assert [record.skipped is None for record in states.records] == [True, False, True]
    assert states.records[POOR].skipped.startswith(why)
    assert [record.skipped_rounds for record in states.records] == [0, 1, 1]
    assert not differences(states.seen[0], states.seen[1])
    assert differences(states.seen[1], states.seen[2])
    assert done.strategy.executor_fallback is None
    if cause != "the step":  # as if nobody had come: what clients did has left no trace for the next round either
        assert not differences(states.seen, run(method=ALGORITHMS[name], sampler=Gone(0, 1, 2, 3))[0].seen)


def test_enough_are_enough():
    for options in ({"sampler": Gone(1, 3)}, {"module": Failing}):
        states, _ = run(min_clients=2, **options)
        assert [record.skipped for record in states.records] == [None] * 3
        assert states.records[POOR].client_ids == ((0, 2) if "sampler" in options else (0, 3))
        assert differences(states.seen[0], states.seen[1])


def test_it_says_why_counts_and_logs():
    said = f"^round 1 had {FEW}: the global model is unchanged$"
    with pytest.warns(UserWarning, match=said) as warned:
        states, done = run(sampler=Gone(1, 3), min_clients=3)
    assert len([w for w in warned if "usable report" in str(w.message)]) == 1
    record, late = states.records[POOR], f"the round had {FEW}"
    assert (record.client_ids, record.flagged, record.step_norm) == ((), True, 0.0)
    assert record.dropped == {1: "dropped out", 3: "dropped out", 0: late, 2: late}
    assert done.trainer.callback_metrics["fed/skipped_rounds"] == 1
    assert run(module=Failing, min_clients=3)[0].records[POOR].dropped[1] == "RuntimeError: maintenance"


def test_fewer_must_be_possible():
    with pytest.raises(ValueError, match=r"at most the 3 clients sampled .*, found 4: no round would"):
        fl.FederatedStrategy(clients_per_round=3, min_clients=4)
    fl.FederatedStrategy(clients_per_round=3, min_clients=3)
    with pytest.raises(ValueError, match=r"at most the 3 clients sampled per round \(clients_per_round=0.5\), found 4"):
        train(clients_per_round=0.5, min_clients=4)  # of how many is known only now


# ---- steps


class Huge(Attack):
    """One client's update is finite and far too long."""

    def __init__(self, factor=1e30):
        self.factor, self.clients = factor, (BAD,)

    def replace(self, update, params, seed):
        update.mul_(self.factor)


OPTIMIZERS = [
    *(partial(kind, lr=0.1) for kind in (optim.FedAdam, optim.FedYogi, optim.FedAdagrad, torch.optim.Adam)),
    partial(torch.optim.SGD, lr=1e12, momentum=0.9),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda made: made.func.__name__)
def test_a_huge_update_reaches_neither_the_model_nor_the_server_optimizer(optimizer):
    words = rf"would not be finite.* largest norms of updates are client {BAD} \d"
    with pytest.warns(UserWarning, match=rf"round 0 was left out: .*{words}"):
        states, done = run(1, server_optimizer=optimizer, attack=Huge())
    assert torch.equal(weights(done.module), weights(fresh(norm=True)))
    assert not states.seen[0]["server_optimizer"]["state"]
    assert (states.records[0].client_ids, set(states.records[0].dropped)) == ((), {0, 1, 2, 3})
    with pytest.raises(fl.ClientError, match=rf"^round 0: .* {words}"):
        run(1, server_optimizer=optimizer, attack=Huge(), on_client_error="raise")


class Idle(Classifier):
    """Trains with any weights, and stays where it is."""

    def training_step(self, batch, batch_idx):
        return sum((p * 0).sum() for p in self.parameters())


class Runaway(FedAvg):
    """Moves every parameter by more than half of the largest number."""

    def aggregate(self, cohort):
        return super().aggregate(cohort) * 0 + 2e38


def test_a_step_beyond_the_largest_number_is_not_taken():
    with pytest.warns(UserWarning, match=r"round 1 was left out: the global parameters would not be finite"):
        states, _ = run(2, Runaway, Idle, server_optimizer=None)
    assert states.seen[0]["weights"].min() < -1e38
    assert not differences(states.seen[0], states.seen[1])


# ---- rounds that come to nothing

STOPS = {
    "clients fail": (
        {"module": failing_in(1, 2, 3)},
        r"^3 rounds in a row changed nothing although clients trained, up to round 3, which had no usable report "
        r"\(client 0: RuntimeError: maintenance; client 1: .*max_failed_rounds=3",
    ),
    "steps are refused": (
        {"server_optimizer": OPTIMIZERS[0], "attack": Huge(), "max_failed_rounds": 2},
        r"^2 rounds in a row .* which was left out: .*largest norms.* client 2",
    ),
    "weights break everybody": (
        {"attack": Huge(1e36)}, r"3 rounds in a row .*client 0: its (update|training loss) is (not|nan)",
    ),
    "one is enough": ({"module": failing_in(2), "max_failed_rounds": 1}, "^1 round in a row"),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPS)
def test_a_fit_that_gets_nowhere_stops(name):
    options, words = STOPS[name]
    with pytest.raises(fl.ClientError, match=words):
        run(9, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"module": failing_in(0, 1, 3, 4)},  # not in a row
        {"module": failing_in(0, 1, 2, 3), "max_failed_rounds": None},
        {"sampler": Gone(0, 1, 2, 3, for_good=True)},  # nobody trains
    ],
    ids=["not in a row", "no limit", "nobody trains"],
)
def test_it_goes_on_otherwise(options):
    assert run(6, **options)[1].trainer.current_epoch == 6


def test_a_resumed_fit_goes_on_counting(tmp_path):
    run(3, module=failing_in(1, 2))[1].trainer.save_checkpoint(tmp_path / "two.ckpt")
    with pytest.raises(fl.ClientError, match=r"^3 rounds in a row .* up to round 3"):
        run(6, module=failing_in(3), ckpt_path=tmp_path / "two.ckpt")
    assert run(6, module=failing_in(4, 5), ckpt_path=tmp_path / "two.ckpt")[1].trainer.current_epoch == 6
