# SPDX-License-Identifier: Apache-2.0
"""Every server rule with every client rule: it runs, repeats on both paths and resumes, or is refused with a reason."""

from itertools import product

import lightning as L
import pytest
import torch
from resuming import ALGORITHMS
from support import Classifier, federated_blobs, fresh, on_path, train, weights

import fl_lightning as fl
from fl_lightning.algorithms import ClientRule

CLIENTS = {name: rule for name, rule in ALGORITHMS.items() if type(rule().client_rule()) is not ClientRule}
HALVES = [None, *CLIENTS]


class StopAfterTwoRounds(L.Callback):
    """Saves a checkpoint and stops a fit that was to be longer: methods may plan with its number of rounds."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


class Drops(L.Callback):
    def __init__(self):
        self.dropped = 0

    def on_train_epoch_end(self, trainer, pl_module):
        self.dropped += len(trainer.strategy.last_round.dropped)


def fit_pair(server, client, rounds, seed=0, **options):
    """A module trained by two methods while one client in four drops out."""
    pair = {"algorithm": ALGORITHMS[server](), "client": None if client is None else CLIENTS[client]()}
    sampler = fl.data.AvailabilitySampler(1.0, drop_out=0.25)
    cohorts = {"clients_per_round": 4, "seed": 3, "sampler": sampler, "data": federated_blobs(train=120)}
    return train(fresh(Classifier, seed, norm=True), rounds, **pair, **cohorts, **options).module


def refusal(server, client):
    try:
        fl.FederatedStrategy(ALGORITHMS[server](), client=None if client is None else CLIENTS[client]())
    except ValueError as error:
        return str(error)
    return None


def check(folder, server, client):
    """A pair runs, repeats on either path and resumes."""
    drops = Drops()
    whole = fit_pair(server, client, 3, callbacks=[drops])
    assert drops.dropped > 0
    assert weights(whole).isfinite().all()
    assert [p.shape for p in whole.parameters()] == [p.shape for p in fresh(Classifier, norm=True).parameters()]
    assert not torch.equal(weights(whole), weights(fresh(Classifier, norm=True)))
    # A second fit up to the checkpoint, on the full path, and a third one from it: equal only if every round repeats.
    fit_pair(server, client, 3, callbacks=[StopAfterTwoRounds(folder / "two.ckpt")], **on_path(lean=False))
    resumed = fit_pair(server, client, 3, seed=7, ckpt_path=folder / "two.ckpt")
    assert torch.equal(weights(resumed), weights(whole))


def chosen(fitting, place):
    """One of those that fit, another one for every place."""
    return fitting[place % len(fitting)]


def client_beside(server):
    return chosen([client for client in HALVES if refusal(server, client) is None], list(ALGORITHMS).index(server))


@pytest.mark.parametrize("server", ALGORITHMS)
def test_every_server_half_beside_one_of_the_client_halves_that_fit(tmp_path, server):
    check(tmp_path, server, client_beside(server))


@pytest.mark.parametrize("client", sorted(set(CLIENTS) - {client_beside(server) for server in ALGORITHMS}))
def test_every_client_half_beside_one_of_the_server_halves_that_fit(tmp_path, client):
    fitting = [server for server in ALGORITHMS if refusal(server, client) is None]
    check(tmp_path, chosen(fitting, 5 * HALVES.index(client)), client)


@pytest.mark.slow
@pytest.mark.parametrize(("server", "client"), list(product(ALGORITHMS, HALVES)))
def test_every_pair(tmp_path, server, client):
    if refusal(server, client) is None:
        check(tmp_path, server, client)


def test_pairs_are_refused_with_a_reason():
    found = {pair: refusal(*pair) for pair in product(ALGORITHMS, HALVES)}
    refused = {pair: reason for pair, reason in found.items() if reason is not None}
    assert 100 < len(refused) < len(found) - 100
    for (server, client), reason in refused.items():
        assert client is not None, server
        assert reason.startswith(f"client={client}(")
        assert len(reason) > len(f"client={client}(...)") + 20
