# SPDX-License-Identifier: Apache-2.0
from functools import partial

import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows
from support import federated_blobs, fresh, quiet_trainer

import fl_lightning as fl
from fl_lightning.algorithms import AFL
from fl_lightning.core.storage import rule_state


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
