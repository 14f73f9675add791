# SPDX-License-Identifier: Apache-2.0
"""``FederatedStrategy(guard=...)``: what a method, a client rule, records, logs and checkpoints see of it."""

import pytest
import torch
from support import Classifier, federated_blobs, fresh, training_only, weights
from watching import Recorder

import fl_lightning as fl
from fl_lightning.fit.on_ranks import whole_rows_reason

pytestmark = pytest.mark.fit
LOUD = fl.attacks.ScaledUpdates((1, 4), factor=50.0)


def fitted(rule=None, rounds=1, ckpt=None, module=None, **options):
    rule, module = rule or Recorder("uniform"), module or fresh(Classifier)
    strategy = fl.FederatedStrategy(rule, seed=2, **options)
    trainer = training_only(strategy, rounds)
    trainer.fit(module, federated_blobs(), ckpt_path=ckpt)
    return rule, strategy, trainer, weights(module)


def test_clients_left_out_are_gone_for_everybody():
    seen = []

    class Committing(fl.algorithms.ClientRule):
        def commit(self, cohort):
            seen.append(cohort.client_ids)

    rule, strategy, trainer, _ = fitted(client=Committing(), guard=fl.guards.MultiKrum(1, keep=3), attack=LOUD,
                                        clients_per_round=6)  # fmt: skip
    open_rule, *_ = fitted(attack=LOUD, clients_per_round=6)
    ids, rows = rule.cohorts[0].client_ids, rule.rows[0]
    record = strategy.last_round
    all_ids, all_rows = open_rule.cohorts[0].client_ids, open_rule.rows[0]
    assert len(all_ids) == 6
    assert {1, 4} <= set(record.dropped)
    assert set(record.dropped.values()) == {"MultiKrum finds its update too far from the others"}
    assert record.client_ids == ids == seen[0]
    assert sorted([*ids, *record.dropped]) == sorted(all_ids)
    assert torch.equal(rows, all_rows[[all_ids.index(client) for client in ids]])
    assert trainer.callback_metrics["fed/MultiKrum/left_out"] == 3
    assert trainer.callback_metrics["fed/dropped"] == 3


def test_guards_come_one_after_the_other():
    guard = [fl.guards.NormClipping(0.05), fl.guards.MultiKrum(1, keep=4), fl.guards.NormClipping(0.01)]
    rule, strategy, *_ = fitted(guard=guard, attack=LOUD, clients_per_round=6)
    (rows,), norms = rule.rows, rule.cohorts[0].updates.norms()
    assert len(rows) == 4
    torch.testing.assert_close(norms, torch.full((4,), 0.01, dtype=torch.float64))
    torch.testing.assert_close(norms, rows.double().norm(dim=1))
    assert set(strategy.last_round.scalars) == {
        "NormClipping/left_out", "NormClipping/clipped", "MultiKrum/left_out",
        "NormClipping_2/left_out", "NormClipping_2/clipped",
    }  # fmt: skip
    assert float(strategy.last_round.update_norms.max()) > 0.05  # as they were sent


def test_reasons_go_to_the_clients_that_each_guard_leaves_out():
    guard = [fl.guards.MultiKrum(1, keep=5), fl.guards.MultiKrum(1, keep=2)]
    rule, strategy, *_ = fitted(guard=guard, attack=LOUD, clients_per_round=6)
    left_out, ids = strategy.last_round.dropped, rule.cohorts[0].client_ids
    assert strategy.last_round.scalars == {"MultiKrum/left_out": 1, "MultiKrum_2/left_out": 3}
    assert len(ids) == 2
    assert sorted([*ids, *left_out]) == [0, 1, 2, 3, 4, 5]


class Lossy(fl.data.CohortSampler):
    """All clients, of whom the first ones vanish."""

    def __init__(self, lost):
        self.lost = lost

    def select(self, round, cohort_size, sizes, seed):  # noqa: A002
        return fl.data.Selection(tuple(range(cohort_size)), tuple(range(self.lost)))


def test_a_round_that_a_guard_cannot_judge_changes_nothing():
    with pytest.warns(UserWarning, match=r"round 0 had 4 usable reports, fewer than the 5 that Krum\(.*\) needs"):
        rule, strategy, _, theta = fitted(guard=fl.guards.Krum(1), sampler=Lossy(2), clients_per_round=6)
    assert rule.cohorts == []
    assert torch.equal(theta, weights(fresh(Classifier)))
    assert strategy.last_round.skipped.startswith("4 usable reports")


def test_a_skipped_round_names_the_clients_that_an_earlier_guard_left_out():
    both = [fl.guards.MultiKrum(1), fl.guards.Krum(1)]
    with pytest.warns(UserWarning, match=r"had 4 usable reports, fewer than the 5 that Krum\(.*\) needs"):
        _, strategy, *_ = fitted(guard=both, attack=LOUD, sampler=Lossy(1), clients_per_round=6)
    reasons = list(strategy.last_round.dropped.values())
    assert len(reasons) == 6
    assert sum("MultiKrum" in reason for reason in reasons) == 1
    assert sum("that Krum(dishonest=1) needs" in reason for reason in reasons) == 4


def test_rounds_that_a_guard_cannot_judge_end_the_fit():
    with pytest.warns(UserWarning, match="fewer than the 5"), pytest.raises(fl.ClientError, match="3 rounds in a row"):
        fitted(guard=fl.guards.Krum(1), sampler=Lossy(2), clients_per_round=6, rounds=5)


G = fl.guards
LATE = fl.data.AvailabilitySampler(1.0, [1.0, 1.0, 0.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"guard": G.Krum(0.4), "clients_per_round": 3}, r"the 3 clients .*, found Krum\(dishonest=0.4\), .* takes 15"),
        ({"guard": G.Krum(2), "clients_per_round": 1.0}, r"the 6 clients .*, found Krum\(dishonest=2\), .* takes 7"),
        ({"guard": G.MultiKrum(1, keep=7), "clients_per_round": 6}, "found MultiKrum.*, which takes 7"),
        ({"guard": G.Bulyan(1), "clients_per_round": 6}, "found Bulyan.*, which takes 7"),
        ({"guard": G.TrimmedMean(2), "clients_per_round": 4}, "found TrimmedMean.*, which takes 5"),
        (
            {"guard": [G.MultiKrum(1, keep=4), G.Krum(1)], "clients_per_round": 6},
            "the 4 clients at most whom MultiKrum",
        ),
        ({"guard": [G.CosineTrust(0), G.TrimmedMean(1)], "clients_per_round": 3}, "the 2 clients at most whom Cosine"),
        ({"guard": G.Krum(1), "sampler": LATE, "clients_per_round": 6}, "4 clients that have data and report by Avail"),
        ({"guard": G.CosineTrust(9), "clients_per_round": 6}, "client of CosineTrust must be an id below 6, found 9"),
        ({"min_clients": 5, "sampler": LATE, "clients_per_round": 6}, "min_clients must be at most the 4 clients"),
        ({"sampler": fl.data.AvailabilitySampler(0.0), "clients_per_round": 6}, "at most the 0 clients"),
    ],
)
def test_what_no_round_can_satisfy_is_refused_before_the_first(options, words):
    started = []

    class Counting(Classifier):
        def on_train_start(self):
            started.append(self)

    with pytest.raises(ValueError, match=words):
        fitted(module=fresh(Counting), **options)
    assert not started


def test_a_guard_goes_on_from_a_checkpoint(tmp_path):
    options = {"guard": fl.guards.AdaptiveNormClipping(), "attack": LOUD}
    *_, straight = fitted(rounds=4, **options)
    _, _, trainer, _ = fitted(rounds=2, **options)
    bound = options["guard"].bound
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    again = {"guard": fl.guards.AdaptiveNormClipping(), "attack": LOUD}
    *_, resumed = fitted(rounds=4, ckpt=tmp_path / "two.ckpt", **again)
    assert bound > 0
    assert torch.equal(resumed, straight)
    with pytest.warns(UserWarning, match=r"guard: \['AdaptiveNormClipping.*became \['Krum"):
        fitted(rounds=3, ckpt=tmp_path / "two.ckpt", guard=fl.guards.Krum(0), attack=LOUD)


def test_a_refused_round_does_not_count_for_a_guard():
    class Infinite(fl.algorithms.FedAvg):
        def aggregate(self, cohort):
            return torch.full_like(cohort.params, torch.inf)

    guard = fl.guards.AdaptiveNormClipping()
    with pytest.warns(UserWarning, match="finite step"):
        fitted(Infinite(), guard=guard, on_client_error="drop")
    assert guard.bound == 0


def test_bad_guards():
    with pytest.raises(TypeError, match="guard of FederatedStrategy must be"):
        fl.FederatedStrategy(guard="krum")
    with pytest.raises(ValueError, match=r"guard of FederatedStrategy must be None or at least one guard, found \[\]"):
        fl.FederatedStrategy(guard=[])


def test_cosine_trust_with_a_client_of_the_server():
    _, strategy, trainer, _ = fitted(
        rounds=2,
        guard=fl.guards.CosineTrust(3, rows="own"),
        sampler=fl.data.UniformSampler(always=(3,)),
        clients_per_round=4,
    )
    assert strategy.last_round.dropped[3] == "CosineTrust compares the others with it"
    assert 0 < float(trainer.callback_metrics["fed/CosineTrust/mean_trust"]) <= 1


def test_a_guard_that_needs_whole_rows_is_named():
    class Whole(fl.guards.NormClipping):
        def judge(self, cohort):
            return super().judge(cohort)

    def reason(*guards):
        return whole_rows_reason(fl.FederatedStrategy(guard=list(guards)).options)

    assert reason(fl.guards.NormClipping(1.0)) is None
    assert reason(fl.guards.NormClipping(1.0), Whole(1.0)).startswith("Whole does not say that it works on columns")
