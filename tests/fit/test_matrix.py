# SPDX-License-Identifier: Apache-2.0
"""Every server rule with every client rule: it runs, repeats and resumes, or it is refused with a reason."""

from itertools import product

import lightning as L
import pytest
import torch
from resuming import ALGORITHMS
from support import Classifier, federated_blobs, fit, fresh, weights

import fl_lightning as fl
from fl_lightning.algorithms import ClientRule

CLIENTS = {name: rule for name, rule in ALGORITHMS.items() if type(rule().client_rule()) is not ClientRule}
PAIRS = list(product(ALGORITHMS, [None, *CLIENTS]))


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
    return fit(fresh(Classifier, seed, norm=True), rounds, **pair, **cohorts, **options).module


def refusal(server, client):
    try:
        fl.FederatedStrategy(ALGORITHMS[server](), client=None if client is None else CLIENTS[client]())
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("server", "client"), PAIRS)
def test_runs_repeats_and_resumes_or_is_refused(tmp_path, server, client):
    reason = refusal(server, client)
    if reason is not None:
        assert client is not None
        assert reason.startswith(f"client={client}(")
        assert len(reason) > len(f"client={client}(...)") + 20
        return
    drops = Drops()
    whole = fit_pair(server, client, 3, callbacks=[drops])
    assert drops.dropped > 0
    assert weights(whole).isfinite().all()
    assert [p.shape for p in whole.parameters()] == [p.shape for p in fresh(Classifier, norm=True).parameters()]
    assert not torch.equal(weights(whole), weights(fresh(Classifier, norm=True)))
    # A second fit up to the checkpoint, and a third one from it: equal only if every round repeats.
    fit_pair(server, client, 3, callbacks=[StopAfterTwoRounds(tmp_path / "two.ckpt")])
    resumed = fit_pair(server, client, 3, seed=7, ckpt_path=tmp_path / "two.ckpt")
    assert torch.equal(weights(resumed), weights(whole))


def test_the_specified_compositions_are_among_them():
    for base in ("FedProx", "SCAFFOLD", "MOON", "FedDyn", "FedProc", "FedProto"):
        assert refusal("FedHEAL", base) is None
    assert refusal("AFL", "FedProx") is None
    assert refusal("QFedAvg", "FedProx") is None
