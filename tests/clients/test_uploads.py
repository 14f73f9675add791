# SPDX-License-Identifier: Apache-2.0
"""What clients send besides updates: accuracies at the global model, and full gradients in place of updates."""

import pytest
import torch
import torch.nn.functional as F
from plain_loop import client_batches
from support import CLASSES, FEATURES, Classifier, Tally, fresh, train, weights
from torch import nn
from watching import Recorder

import fl_lightning as fl
from fl_lightning.algorithms import SCAFFOLD, FedProx
from fl_lightning.core.seeding import derive_seed
from fl_lightning.data.cohort_samplers import UniformSampler


class Judged(Classifier):
    """Says how accurate it is, and counts how often it was asked."""

    def __init__(self, **options):
        super().__init__(**options)
        self.asked, self.passes = Tally(), 0

    def forward(self, x):
        self.passes += 1
        return super().forward(x)

    def federated_accuracy(self, batch, batch_idx):
        assert not torch.is_grad_enabled()
        assert not self.training
        self.asked += 1
        self.log("must_not_show", 1.0)
        x, y = batch
        return (self(x).argmax(1) == y).float().mean()


@pytest.mark.parametrize("losses", [False, True])
def test_accuracies_are_those_of_the_global_model_on_the_clients_training_data(losses):
    module, rule = fresh(Judged, dropout=0.5), Recorder(accuracies=True, losses=losses)
    trainer = train(module, 2, algorithm=rule, loss_batch_size=1000).trainer
    loaders, by_hand = client_batches(), fresh(dropout=0.5).eval()
    for cohort, params in zip(rule.cohorts, rule.params, strict=True):
        nn.utils.vector_to_parameters(params, by_hand.parameters())
        for place, client in enumerate(cohort.client_ids):
            batches = [batch for batch, _ in loaders.batches(client, seed=None)]
            x, y = (torch.cat(column) for column in zip(*batches, strict=True))
            right = (by_hand(x).argmax(1) == y).double().mean()
            assert cohort.extras["accuracy"][place] == pytest.approx(float(right), abs=1e-6)
            if losses:
                assert cohort.losses[place] == pytest.approx(float(F.cross_entropy(by_hand(x), y).detach()), abs=1e-5)
        assert (cohort.losses is not None) == losses
    assert module.asked.count == 6  # a client's whole data in one batch
    assert "must_not_show" not in trainer.callback_metrics


def test_nobody_is_asked_for_accuracies_in_vain():
    module = fresh(Judged)
    train(module, 2, algorithm=Recorder(losses=True))
    assert module.asked.count == 0


def test_asking_changes_no_weights():
    judged, silent = fresh(Judged, dropout=0.5, norm=True), fresh(dropout=0.5, norm=True)
    train(judged, 2, algorithm=Recorder(accuracies=True))
    train(silent, 2, algorithm=Recorder())
    assert torch.equal(weights(judged), weights(silent))


class Wrong(Judged):
    def federated_accuracy(self, batch, batch_idx):
        return 100 * super().federated_accuracy(batch, batch_idx) + 1


class Sometimes(Judged):
    def federated_accuracy(self, batch, batch_idx):
        self.asked += 1
        return float("nan") if self.asked.count == 2 else 0.5  # a plain number will do


def test_accuracies_that_are_none_are_refused_or_dropped():
    with pytest.raises(fl.ClientError, match=r"Wrong\.federated_accuracy must return a share between 0 and 1, found"):
        train(fresh(Wrong), algorithm=Recorder(accuracies=True))
    rule = Recorder(accuracies=True)
    with pytest.warns(UserWarning, match="federated_accuracy must return a share"):
        train(fresh(Sometimes), 1, algorithm=rule, on_client_error="drop")
    assert rule.cohorts[0].extras["accuracy"].tolist() == [0.5, 0.5]


def test_a_module_that_does_not_know_its_accuracy_is_told_what_to_define():
    words = r"Recorder needs each client's accuracy: define federated_accuracy\(self, batch, batch_idx\) on Plain"
    with pytest.raises(ValueError, match=words):
        train(fresh(type("Plain", (Classifier,), {"federated_accuracy": None})), algorithm=Recorder(accuracies=True))


def test_the_ready_module_knows_its_accuracy():
    torch.manual_seed(0)
    rule = Recorder(accuracies=True)
    train(fl.ClientModule(nn.Linear(FEATURES, CLASSES)), 1, algorithm=rule)
    assert (rule.cohorts[0].extras["accuracy"] > 0).any()
    module = fl.ClientModule(nn.Linear(FEATURES, 1), loss=nn.functional.mse_loss)
    with pytest.raises(ValueError, match="targets must be class indices beside class scores"):
        module.federated_accuracy((torch.zeros(3, FEATURES), torch.zeros(3, 1)), 0)


# ---- full gradients


def gradient_descent(rounds, lr=0.1, seed=5, cohort=3):
    """FedSGD by hand: each round one step along the mean of the clients' full gradients."""
    module, loaders = fresh(), client_batches()
    for index in range(rounds):
        chosen = UniformSampler().select(index, cohort, loaders.sizes, derive_seed(seed, "sampler")).client_ids
        x, y = (
            torch.cat([batch[part] for client in chosen for batch, _ in loaders.batches(client, seed=None)])
            for part in (0, 1)
        )
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()  # the mean over all samples weighs clients by their samples
        with torch.no_grad():
            for p in module.parameters():
                p -= lr * p.grad
    return module


def test_fedsgd_equals_gradient_descent_on_the_cohorts_data():
    module = fresh()
    _, strategy, trainer = train(module, full_gradients=True)
    assert torch.allclose(weights(module), weights(gradient_descent(3)), atol=1e-6, rtol=0)
    assert (trainer.global_step, strategy.last_round.local_steps) == (3, 9)  # a round is one step, of three clients
    assert strategy._fits.states()["fit"]["full_gradients"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"local_epochs": 2}, "leave local_epochs and local_steps out, found local_epochs=2"),
        ({"local_steps": 4}, "local_steps=4"),
        ({"algorithm": FedProx()}, "FedProx changes local training: leave full_gradients out"),
        ({"algorithm": SCAFFOLD(), "client": SCAFFOLD()}, "SCAFFOLD changes local training"),
        ({"client": FedProx()}, r"client=FedProx\(...\) changes local training: leave one of them out"),
    ],
)
def test_full_gradients_leave_nothing_to_train_locally(arguments, words):
    with pytest.raises(ValueError, match=words):
        fl.FederatedStrategy(full_gradients=True, **arguments)


def test_full_gradients_need_a_learning_rate():
    with pytest.raises(ValueError, match=r"FedAvg needs the clients' learning rate: use one torch\.optim\.SGD"):
        train(fresh(optimizer="Adam"), full_gradients=True)
