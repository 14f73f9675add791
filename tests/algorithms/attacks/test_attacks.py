# SPDX-License-Identifier: Apache-2.0
"""Dishonest clients."""

import pytest
import torch
from cases import in_turn
from support import Classifier, federated_blobs, fresh, training_only, weights
from watching import Recorder

import fl_lightning as fl


def first_round(attack=None, rounds=1, **options):
    rule, module = Recorder(losses=True), fresh(Classifier)
    strategy = fl.FederatedStrategy(rule, attack=attack, seed=2, **options)
    training_only(strategy, rounds).fit(module, federated_blobs())
    return rule, weights(module)


ATTACKS = {
    "noise": fl.attacks.RandomUpdates((1, 4), std=0.5),
    "noise of the same length": fl.attacks.RandomUpdates((1, 4), match_norm=True),
    "enlarged": fl.attacks.ScaledUpdates((1, 4)),
    "nothing": fl.attacks.ZeroUpdates((1, 4)),
    "a random model": fl.attacks.RandomModels((1, 4), std=0.5),
    "a model of zeros": fl.attacks.RandomModels((1, 4), std=0.0),
}


@pytest.mark.fit
@pytest.mark.parametrize(("name", "full_gradients"), in_turn(ATTACKS, [False, True]))
def test_only_the_updates_of_dishonest_clients_change(name, full_gradients):
    honest, _ = first_round(full_gradients=full_gradients)
    attacked, _ = first_round(ATTACKS[name], full_gradients=full_gradients)
    start = weights(fresh(Classifier))
    ids = honest.cohorts[0].client_ids
    assert attacked.cohorts[0].client_ids == ids
    assert torch.equal(attacked.cohorts[0].losses, honest.cohorts[0].losses)
    for client, before, after in zip(ids, honest.rows[0], attacked.rows[0], strict=True):
        if client not in (1, 4):
            assert torch.equal(before, after)
        elif name == "nothing":
            assert not after.any()
        elif name == "enlarged":
            torch.testing.assert_close(after, 100 * before)
        elif name == "noise":
            assert 0.4 < float(after.std()) < 0.6
            assert abs(float(after.mean())) < 0.2
        elif name == "a random model":
            sent = start - after
            assert 0.4 < float(sent.std()) < 0.6
            assert not torch.equal(sent, start - attacked.rows[0][ids.index(5 - client)])
        elif name == "a model of zeros":
            assert torch.equal(after, start)
        else:
            assert float(after.norm()) == pytest.approx(float(before.norm()), rel=1e-5)
            assert abs(float(torch.cosine_similarity(before, after, dim=0))) < 0.5


@pytest.mark.fit
def test_noise_differs_between_clients_and_rounds_and_repeats_with_the_seed():
    one, theta = first_round(ATTACKS["noise"], rounds=2)
    again, same = first_round(ATTACKS["noise"], rounds=2)
    assert torch.equal(theta, same)
    places = [[cohort.client_ids.index(client) for client in (1, 4)] for cohort in one.cohorts]
    noise = [one.rows[when][place] for when in (0, 1) for place in places[when]]
    assert all(not torch.equal(a, b) for i, a in enumerate(noise) for b in noise[:i])
    assert torch.equal(one.rows[1], again.rows[1])


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_noise_has_the_norm_of_updates_of_any_size(size):
    update = torch.linspace(-1, 1, 50) * size
    norm = float(update.double().norm())
    fl.attacks.RandomUpdates((), match_norm=True).replace(update, torch.zeros(50), seed=3)
    assert float(update.double().norm()) == pytest.approx(norm, rel=1e-5)


def test_fixed_ids():
    ids = fl.attacks.dishonest_clients(100, 0.1, seed=3)
    assert len(set(ids)) == 10
    assert ids == fl.attacks.dishonest_clients(100, 0.1, seed=3) == tuple(sorted(ids))
    assert ids != fl.attacks.dishonest_clients(100, 0.1, seed=4)
    assert fl.attacks.dishonest_clients(5, 0.0) == ()
    assert fl.attacks.dishonest_clients(5, 1.0) == (0, 1, 2, 3, 4)


@pytest.mark.fit
def test_bad_arguments():
    with pytest.raises(ValueError, match=r"share of dishonest_clients must be a number from 0 to 1, found 2"):
        fl.attacks.dishonest_clients(10, 2)
    with pytest.raises(ValueError, match="std of RandomUpdates must be a positive, finite number, found 0"):
        fl.attacks.RandomUpdates((1,), std=0)
    with pytest.raises(ValueError, match="std of RandomModels must be a finite number from 0 on, found -1"):
        fl.attacks.RandomModels((1,), std=-1)
    with pytest.raises(ValueError, match="factor of ScaledUpdates must be a finite number, found inf"):
        fl.attacks.ScaledUpdates((1,), factor=float("inf"))
    with pytest.raises(TypeError, match="attack of FederatedStrategy must be None or an Attack such as"):
        fl.FederatedStrategy(attack=(1, 2))
    with pytest.raises(ValueError, match=r"clients of ZeroUpdates must be ids below 6, found \[6\]"):
        first_round(fl.attacks.ZeroUpdates((0, 6)))
