# SPDX-License-Identifier: Apache-2.0
from functools import partial

import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from support import federated_blobs, fresh, quiet_trainer

import fl_lightning as fl
from fl_lightning.algorithms import AFL
from fl_lightning.core.storage import rule_state

few = settings(max_examples=20, deadline=None, derandomize=True)
loss = st.floats(0, 100)


rounds = st.lists(st.dictionaries(st.integers(0, 8), loss, min_size=1, max_size=5), min_size=1, max_size=8)


@few
@given(rounds, st.floats(0, 2))
def test_lambda_stays_on_the_simplex_and_absent_clients_keep_theirs(rounds, gamma):
    rule = AFL(gamma)
    before = dict.fromkeys(range(9), 1 / 9)
    for when, losses in enumerate(rounds):
        ids = list(losses)
        rows = random_rows(len(ids), when)
        step = rule.aggregate(make_cohort(rows, list(losses.values()), ids, when, num_clients=9))
        lam = before | rule_state.state_dict(rule)["lam"]
        assert min(lam.values()) >= 0
        assert sum(lam.values()) == pytest.approx(1, abs=1e-12)
        assert all(lam[i] == before[i] for i in range(9) if i not in ids)
        torch.testing.assert_close(step, rule.report.weights @ rows)
        assert rule.report.weights.sum() == pytest.approx(1)
        for i in ids:  # the ascent shifts participants alike, plus their losses
            for j in ids:
                if lam[i] > 0 and lam[j] > 0 and not rule.report.flagged:
                    rise = (lam[i] - before[i]) - (lam[j] - before[j])
                    assert rise == pytest.approx(gamma * (losses[i] - losses[j]), abs=1e-9)
        before = lam


def test_by_hand():
    """Two of four clients hold half of lambda: (1/4, 1/4) + 0.1 (3, 1) projected on sum 1/2 is (0.35, 0.15)."""
    rule, rows = AFL(0.1), random_rows(2, 1)
    cohort = make_cohort(rows, [3.0, 1.0], [5, 7], num_clients=4)
    torch.testing.assert_close(rule.aggregate(cohort), rows.mean(0))  # lambda as it was before the ascent
    assert rule_state.state_dict(rule)["lam"] == pytest.approx({5: 0.35, 7: 0.15})
    torch.testing.assert_close(rule.aggregate(cohort), 0.7 * rows[0] + 0.3 * rows[1])


def test_participants_without_weight_count_alike():
    rule = AFL(10.0)
    for when in range(2):
        rule.aggregate(make_cohort(random_rows(3, when), [9.0, 1.0, 1.0], [0, 1, 2], when, num_clients=3))
    cohort = make_cohort(random_rows(2, 5), [5.0, 1.0], [1, 2], 2, num_clients=3)
    torch.testing.assert_close(rule.aggregate(cohort), cohort.updates.rows.mean(0))
    assert rule.report.flagged
    assert rule_state.state_dict(rule)["lam"] == {0: 1.0, 1: 0.0, 2: 0.0}


def test_clients_join_with_the_mean_weight_where_nobody_says_how_many_there_are():
    rule = AFL(0.1)
    rule.aggregate(make_cohort(random_rows(2, 1), [3.0, 1.0], [5, 7]))
    rule.aggregate(make_cohort(random_rows(2, 2), [1.0, 1.0], [7, 9]))
    assert rule.report.weights.tolist() == pytest.approx([0.4 / 0.9, 0.5 / 0.9])
    assert rule_state.state_dict(rule)["lam"] == pytest.approx({5: 0.4, 7: 0.4 * 2 / 3, 9: 1 / 3})


# ---- the averaged model


def test_the_mean_is_that_of_all_models_but_the_first():
    rule, params = AFL(), torch.full((92,), 5.0, dtype=torch.float64)
    models = [params]
    assert rule.evaluation_params(params) is params
    for when in range(4):
        models.append(models[-1] - rule.aggregate(make_cohort(random_rows(3, when), when=when, params=models[-1])))
        torch.testing.assert_close(rule.evaluation_params(models[-1]), torch.stack(models[1:]).mean(0))


def test_means_of_half_precision_models_do_not_stall():
    """In bfloat16 a running mean would stop moving after a few hundred rounds."""
    rule, params = AFL(), torch.zeros(92, dtype=torch.bfloat16)
    for when in range(600):
        rule.aggregate(make_cohort(random_rows(1, 1, torch.bfloat16), [1.0], when=when, params=params + when % 2))
    assert rule.evaluation_params(params + 0.5).tolist() == pytest.approx([0.5] * 92, abs=0.002)
    assert rule.evaluation_params(params).dtype == torch.bfloat16


class Keeper(AFL):
    def __init__(self):
        super().__init__(lambda_lr=0.1)
        self.models = []

    def aggregate(self, cohort):
        self.models.append(cohort.params.double().clone())
        return super().aggregate(cohort)


@pytest.mark.parametrize("server", [None, partial(torch.optim.SGD, lr=0.5, momentum=0.9)], ids=["plain", "momentum"])
@pytest.mark.fit
def test_a_fit_evaluates_and_leaves_the_mean_of_what_it_trained(server):
    """Also where a server optimizer makes another model of the step than ``params - step``."""
    module, rule = fresh(), Keeper()
    strategy = fl.FederatedStrategy(rule, clients_per_round=4, server_optimizer=server, seed=2)
    trainer = quiet_trainer(strategy, 3)
    trainer.fit(module, federated_blobs())
    models = [*rule.models[1:], strategy._fits.states()["trained"].double()]
    found = torch.nn.utils.parameters_to_vector(module.parameters()).detach().double()
    torch.testing.assert_close(found, torch.stack(models).mean(0), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, models[-1], atol=1e-3)
    logged = trainer.callback_metrics["val_loss"]
    validated = trainer.validate(module, federated_blobs(), verbose=False)[0]["val_loss"]
    assert float(logged) == pytest.approx(validated, rel=1e-5)

    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, federated_blobs())  # goes on from the last model, not from the mean
    torch.testing.assert_close(rule.models[3], models[-1])
    whole, one_go = fresh(), Keeper()
    strategy = fl.FederatedStrategy(one_go, clients_per_round=4, server_optimizer=server, seed=2)
    quiet_trainer(strategy, 5).fit(whole, federated_blobs())
    torch.testing.assert_close(torch.stack(rule.models), torch.stack(one_go.models), rtol=0, atol=0)


# ---- full participation


@pytest.mark.fit
def test_full_participation_is_asked_for_before_the_first_round():
    rule = AFL(full_participation=True)
    words = r"AFL\(full_participation=True\) needs all 6 clients in every round, found 3: use clients_per_round=1.0"
    with pytest.raises(ValueError, match=words):
        quiet_trainer(fl.FederatedStrategy(rule, clients_per_round=3), 1).fit(fresh(), federated_blobs())
    quiet_trainer(fl.FederatedStrategy(rule), 1).fit(fresh(), federated_blobs())
    with pytest.raises(ValueError, match="needs all 4 clients in every round, found 3"):  # a client dropped out
        rule.aggregate(make_cohort(random_rows(3, 1), num_clients=4))
