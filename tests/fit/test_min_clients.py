# SPDX-License-Identifier: Apache-2.0
"""A round with fewer usable uploads than ``min_clients`` changes nothing and is counted."""

import copy
from functools import partial

import lightning as L
import pytest
import torch
from resuming import ALGORITHMS, Project, SaveAt, assert_equal, differences
from support import Classifier, federated_blobs, fresh, place_of_client, training_only, weights

import fl_lightning as fl
from fl_lightning.data import AvailabilitySampler, CohortSampler, Selection

pytestmark = [
    pytest.mark.filterwarnings("ignore:client .* is left out of round"),
    pytest.mark.filterwarnings("ignore:round .* usable report"),
]
FULL = (0, 1, 3, 5)
POOR = 1  # the round in which only two of four arrive


class PoorRound(CohortSampler):
    """Four clients a round; in one round some vanish."""

    def __init__(self, drop_outs=(1, 5)):
        self.drop_outs = drop_outs

    def select(self, round, cohort_size, sizes, seed):  # noqa: A002
        return Selection(FULL, self.drop_outs if round == POOR else ())


class States(L.Callback):
    """Keeps weights, buffers and everything that is remembered, after every round."""

    def __init__(self):
        self.seen, self.records = [], []

    def on_train_epoch_end(self, trainer, module):
        states = {k: v for k, v in trainer.strategy._fits.states().items() if k not in ("fit", "skipped_rounds")}
        self.seen.append(copy.deepcopy({"weights": weights(module), **states}))
        self.records.append(trainer.strategy.last_round)


def train(rule=fl.algorithms.FedAvg, rounds=3, sampler=None, module=Classifier, **options):
    defaults = {
        "sampler": PoorRound() if sampler is None else sampler,
        "clients_per_round": 4,
        "client_optimizer_state": "keep",
        "server_optimizer": partial(torch.optim.SGD, lr=1.0, momentum=0.9),
        "seed": 3,
    }
    states = States()
    if rule().needs.full_gradients:
        defaults["client_optimizer_state"] = "reset"
    if rule().needs.exact_step:
        defaults["server_optimizer"] = None
    strategy = fl.FederatedStrategy(rule(), **{**defaults, **options})
    fitted = training_only(strategy, rounds, callbacks=[states])
    fitted.fit(fresh(module, momentum=0.9, norm=True), federated_blobs())
    return states, fitted


# Nothing is kept, at the server, by client at the server, at clients, as a history; full gradients. Any other method is
# taken back in the same way, as tests/fit/test_refused_steps.py shows of all.
@pytest.mark.parametrize("name", ["FedAvg", "AFL", "SCAFFOLD", "Ditto", "FedLF", "FCFL"])
def test_a_round_below_it_changes_nothing(name):
    states, trainer = train(ALGORITHMS[name], min_clients=3)
    assert [record.skipped is None for record in states.records] == [True, False, True]
    assert not differences(states.seen[0], states.seen[1])
    assert differences(states.seen[1], states.seen[2])
    # As if nobody had come: what the two clients did has left no trace for the next round either.
    nobody, _ = train(ALGORITHMS[name], sampler=PoorRound(FULL))
    assert not differences(states.seen, nobody.seen)
    assert trainer.current_epoch == 3


def test_two_are_enough_for_two():
    states, _ = train(min_clients=2)
    assert [record.skipped for record in states.records] == [None] * 3
    assert states.records[POOR].client_ids == (0, 3)
    assert differences(states.seen[0], states.seen[1])


def test_it_says_why_counts_and_logs():
    with pytest.warns(
        UserWarning, match="^round 1 had 2 usable reports, fewer than min_clients=3: the global model is unchanged$"
    ) as warned:
        states, trainer = train(min_clients=3)
    assert len([w for w in warned if "usable report" in str(w.message)]) == 1
    record = states.records[POOR]
    why = "2 usable reports, fewer than min_clients=3"
    assert record.skipped == why
    assert (record.client_ids, record.flagged, record.step_norm) == ((), True, 0.0)
    gone, late = "dropped out", f"the round had {why}"
    assert record.dropped == {1: gone, 5: gone, 0: late, 3: late}
    assert [r.skipped_rounds for r in states.records] == [0, 1, 1]
    assert trainer.callback_metrics["fed/skipped_rounds"] == 1
    assert trainer.strategy._fits.states()["skipped_rounds"] == 1


def test_nobody_at_all_is_the_same_case():
    states, _ = train(sampler=PoorRound(FULL))
    assert states.records[POOR].skipped == "no usable report"
    assert [r.skipped_rounds for r in states.records] == [0, 1, 1]
    assert not differences(states.seen[0], states.seen[1])


class Failing(Classifier):
    """Two of the clients fail in one round."""

    def training_step(self, batch, batch_idx):
        if self.current_epoch == POOR and place_of_client(self.trainer) in (1, 2):
            raise RuntimeError("maintenance")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("rule", [fl.algorithms.FedLF, fl.algorithms.SCAFFOLD, fl.algorithms.Ditto])
def test_clients_that_fail_are_no_usable_uploads(rule):
    options = {"sampler": PoorRound(()), "module": Failing, "on_client_error": "drop"}
    states, _ = train(rule, min_clients=3, **options)
    assert not differences(states.seen[0], states.seen[1])
    assert states.records[POOR].dropped[1] == "RuntimeError: maintenance"
    assert states.records[POOR].skipped == "2 usable reports, fewer than min_clients=3"
    enough, _ = train(rule, min_clients=2, **options)
    assert differences(enough.seen[0], enough.seen[1])


def test_worker_processes_leave_no_trace_either():
    alone, _ = train(fl.algorithms.SCAFFOLD, min_clients=3)
    shared, trainer = train(fl.algorithms.SCAFFOLD, min_clients=3, executor=fl.executors.Parallel(2))
    assert trainer.strategy.executor_fallback is None
    assert not differences(alone.seen, shared.seen)


RARE = AvailabilitySampler(0.7, drop_out=0.4)


@pytest.mark.parametrize("rule", ["SCAFFOLD", "AFL"])
def test_a_resumed_fit_is_the_same_bit_for_bit(tmp_path, rule):
    project = Project(
        ALGORITHMS[rule],
        options={"momentum": 0.9, "norm": True},
        strategy={
            "sampler": RARE, "clients_per_round": 4, "min_clients": 2, "client_optimizer_state": "keep", "seed": 0,
            "server_optimizer": partial(torch.optim.Adam, lr=0.05),
        },
        rounds=6,
    )  # fmt: skip
    watch = States()
    hooks = ("on_train_batch_end-1", "on_validation_end", "on_train_epoch_end")
    places = {index: SaveAt(tmp_path / str(index), index, hooks) for index in range(5)}
    whole = project.fit(tmp_path, extra=(watch, *places.values()))
    skipped = [record.round for record in watch.records if record.skipped]
    assert 0 < skipped[0] < skipped[-1] < 5, "a skipped round before and after the checkpoints"
    for index in {skipped[0], skipped[0] + 1, skipped[-1]} & set(places):
        for name, first_row in places[index].logged.items():
            resumed = project.fit(tmp_path / "resumed", ckpt_path=tmp_path / str(index) / f"{name}.ckpt")
            assert_equal(resumed, whole, first_row, f"{name} in round {index}")
            assert resumed.trainer.callback_metrics["fed/skipped_rounds"] == len(skipped)


# ---- the argument


def test_it_must_not_be_more_than_a_round_has():
    with pytest.raises(
        ValueError, match=r"min_clients must be at most the 3 clients sampled .*, found 4: no round would"
    ):
        fl.FederatedStrategy(clients_per_round=3, min_clients=4)
    fl.FederatedStrategy(clients_per_round=3, min_clients=3)
    share = fl.FederatedStrategy(clients_per_round=0.5, min_clients=4)  # of how many is not known yet
    with pytest.raises(ValueError, match=r"at most the 3 clients sampled per round \(clients_per_round=0.5\), found 4"):
        training_only(share, 1).fit(fresh(), federated_blobs())
