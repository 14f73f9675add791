# SPDX-License-Identifier: Apache-2.0
"""Which methods combine, and which arguments FederatedStrategy takes."""

import contextlib
import functools

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support import Classifier, Manual, federated_blobs, fresh, training_only, weights

import fl_lightning as fl
from fl_lightning.algorithms import (
    MOON,
    SCAFFOLD,
    ClientRule,
    Ditto,
    FedAvg,
    FedDyn,
    FedLF,
    FedMDFG,
    FedProto,
    FedProx,
    Needs,
    QFedAvg,
)

GOOD = {
    "FedMDFG(update)+SCAFFOLD": (lambda: FedMDFG(gradient_source="update"), SCAFFOLD),
    "FedLF+ClientRule": (FedLF, ClientRule),
    "FedLF+SCAFFOLD's rule": (FedLF, lambda: SCAFFOLD().client_rule()),
}


@pytest.mark.parametrize("name", GOOD)
def test_pairs_that_make_sense_run(name):
    server, client = GOOD[name]
    module = fresh()
    strategy = fl.FederatedStrategy(server(), client=client(), clients_per_round=4)
    training_only(strategy, 2).fit(module, federated_blobs())
    assert weights(module).isfinite().all()
    assert len(strategy.last_round.client_ids) == 4


def trained_weights(algorithm, client=None, rounds=3):
    module = fresh()
    training_only(fl.FederatedStrategy(algorithm, client=client, seed=1), rounds).fit(module, federated_blobs())
    return weights(module)


def test_a_borrowed_client_half_does_its_work():
    assert torch.equal(trained_weights(FedAvg(), FedProx(0.5)), trained_weights(FedProx(0.5)))
    assert torch.equal(trained_weights(FedAvg("uniform"), SCAFFOLD()), trained_weights(SCAFFOLD()))
    by_samples = SCAFFOLD(weighting="samples")
    assert torch.equal(trained_weights(FedAvg(), by_samples), trained_weights(SCAFFOLD(weighting="samples")))
    assert torch.equal(trained_weights(FedProx(0.1), FedProx(0.5)), trained_weights(FedProx(0.5)))
    for client in (FedProx(0.5), SCAFFOLD()):
        assert not torch.allclose(trained_weights(FedLF(), client), trained_weights(FedLF()), atol=1e-4)


@pytest.mark.parametrize(
    ("server", "client", "words"),
    [
        (SCAFFOLD, FedProx, ["client=FedProx", "cannot replace the client half of SCAFFOLD", "FedAvg or FedLF"]),
        (FedProx, SCAFFOLD, ["client=SCAFFOLD", "cannot replace the client half of FedProx"]),
        (FedLF, FedAvg, ["client=FedAvg(...) has no client half: leave client out, or pass FedAvg as algorithm"]),
        (FedAvg, SCAFFOLD, ["weighting='uniform', and FedAvg updates with 'samples': give both the same"]),
        (SCAFFOLD, MOON, ["client=MOON", "cannot replace the client half of SCAFFOLD"]),
        (MOON, FedProto, ["client=FedProto", "cannot replace the client half of MOON"]),
        (QFedAvg, FedDyn, ["client=FedDyn", "adds h / alpha to a mean", "the step of QFedAvg is no mean"]),
        (FedLF, FedDyn, ["client=FedDyn", "the step of FedLF is no mean: pair it with FedAvg or FedHEAL"]),
        (lambda: FedMDFG(gradient_source="update"), FedDyn, ["client=FedDyn", "the step of FedMDFG is no mean"]),
        (FedDyn, FedProx, ["client=FedProx", "cannot replace the client half of FedDyn"]),
        (FedAvg, fl.algorithms.FCFL, ["client=FCFL(...) reports disparities, and FedAvg reads none"]),
        (fl.algorithms.FCFL, FedProx, ["client=FedProx(...) cannot replace the client half of FCFL"]),
        (lambda: fl.algorithms.FCFL(None), FedProx, ["client=FedProx(...) changes local training"]),
        (FedAvg, fl.algorithms.FairFed, ["counts predictions for groups, which FedAvg does not read"]),
        (fl.algorithms.FairFed, FedProx, ["client=FedProx", "FairFed"]),
        (FedMDFG, FedProx, ["client=FedProx", "FedMDFG takes full gradients", "gradient_source='update'"]),
        (lambda: FedLF(gradient_source="full"), SCAFFOLD, ["client=SCAFFOLD", "FedLF takes full gradients"]),
    ],
)
def test_pairs_that_make_none_are_refused_at_construction(server, client, words):
    with pytest.raises(ValueError, match="client=") as error:
        fl.FederatedStrategy(server(), client=client())
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("algorithm", [FedAvg, "FedAvg", torch.nn.Linear(1, 1), ClientRule()])
def test_what_is_no_server_rule_is_refused(algorithm):
    with pytest.raises(TypeError, match=r"algorithm of .* must be None or a ServerRule such as fl"):
        fl.FederatedStrategy(algorithm)


@pytest.mark.parametrize("client", [SCAFFOLD, "SCAFFOLD", 3])
def test_what_is_no_client_rule_is_refused(client):
    with pytest.raises(TypeError, match="client of FederatedStrategy must be None, a ClientRule or a ServerRule"):
        fl.FederatedStrategy(FedAvg(), client=client)


# ---- what methods need of the module


def adam():
    return fresh(optimizer="Adam", lr=0.01)


class Two(Manual):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.SGD(self.net[2].parameters(), lr=0.1)]


class Groups(Classifier):
    def configure_optimizers(self):
        groups = [{"params": self.net[0].parameters()}, {"params": self.net[2].parameters(), "lr": 0.01}]
        return torch.optim.SGD(groups, lr=0.1)


class Bare(Classifier):
    """Gives no features."""

    federated_features = None


class FullGradients(FedAvg):
    needs = Needs(full_gradients=True)


@pytest.mark.parametrize(
    ("algorithm", "module", "words"),
    [
        (FedProto, Bare, "^FedProto compares features: define federated_features"),
        (MOON, Bare, r"^MOON compares features: define federated_features\(self, batch\) on Bare, .* \[B, d"),
        (SCAFFOLD, adam, "^SCAFFOLD needs the clients' learning rate: use one torch.optim.SGD"),
        (SCAFFOLD, Groups, "needs the clients' learning rate"),
        (SCAFFOLD, Two, "^SCAFFOLD corrects gradients and needs one optimizer, found 2"),
        (FullGradients, adam, "FullGradients needs the clients' learning rate"),
        (lambda: FedLF(gradient_source="full"), adam, "FedLF needs the clients' learning rate"),
        (FullGradients, Manual, "FullGradients needs full gradients, which a module with manual optimization"),
        (FedMDFG, adam, "FedMDFG needs the clients' learning rate"),
        (FedLF, Manual, r"FedLF needs each client's loss, .* define federated_loss\(self, batch, batch_idx\)"),
        (FedProx, Manual, "^FedProx changes the loss"),
    ],
)
def test_modules_that_lack_what_a_method_needs_are_refused(algorithm, module, words):
    """A client half that was given is named, and not its class, nor the algorithm that has nothing to do with it."""
    given = [fl.FederatedStrategy(algorithm())]
    if algorithm in (SCAFFOLD, FedProx, FedProto, MOON):
        given.append(fl.FederatedStrategy(FedAvg("uniform"), client=algorithm()))
    for strategy in given:
        with pytest.raises(ValueError, match=words):
            training_only(strategy, 1).fit(module(), federated_blobs())


# ---- arguments


@pytest.mark.parametrize("value", [0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), True, "3", None, np.int64(0)])
def test_clients_per_round_out_of_range(value):
    with pytest.raises((TypeError, ValueError), match=r"^clients_per_round .*found"):
        fl.FederatedStrategy(clients_per_round=value)


def test_more_clients_per_round_than_there_are():
    with pytest.raises(ValueError, match="clients_per_round must be at most the 6 clients, found 7"):
        training_only(fl.FederatedStrategy(clients_per_round=7), 1).fit(fresh(), federated_blobs())


@pytest.mark.parametrize(("value", "sampled"), [(2, 2), (0.5, 3), (1.0, 6)])
def test_clients_per_round_counts_or_shares(value, sampled):
    strategy = fl.FederatedStrategy(clients_per_round=value)
    training_only(strategy, 1).fit(fresh(), federated_blobs())
    assert len(strategy.last_round.client_ids) == sampled


# tests/arguments tries what is no count at all.
@pytest.mark.parametrize("argument", ["local_epochs", "local_steps", "min_clients", "max_failed_rounds"])
def test_counts_begin_at_one(argument):
    with pytest.raises(ValueError, match=rf"^{argument} of FederatedStrategy must be .*, found 0$"):
        fl.FederatedStrategy(**{argument: 0})


@pytest.mark.parametrize("factory", [lambda parameters: None, lambda parameters: list(parameters)])
def test_factories_that_make_no_optimizer_are_refused(factory):
    with pytest.raises(TypeError, match=r"server_optimizer must make a torch\.optim\.Optimizer from parameters, found"):
        training_only(fl.FederatedStrategy(server_optimizer=factory), 1).fit(fresh(), federated_blobs())


def test_a_server_optimizer_that_cannot_take_a_step_is_refused_before_the_first_round():
    module = fresh()
    message = r"server_optimizer must make an optimizer that steps on one gradient, .*found LBFGS, .*take torch\.optim"
    trainer = training_only(fl.FederatedStrategy(server_optimizer=torch.optim.LBFGS), 1)
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, federated_blobs())
    assert trainer.global_step == 0
    with pytest.raises(ValueError, match=r"server_optimizer must take dense gradients, .*found SparseAdam"):
        training_only(fl.FederatedStrategy(server_optimizer=torch.optim.SparseAdam), 1).fit(module, federated_blobs())
    for optimizer in (torch.optim.AdamW, fl.optim.FedYogi, torch.optim.Rprop):
        strategy = fl.FederatedStrategy(server_optimizer=functools.partial(optimizer, lr=0.01))
        training_only(strategy, 1, limit_train_batches=1).fit(module, federated_blobs())


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (fl.algorithms.FCFL, {"local_epochs": 2}),
        (fl.algorithms.FairReg, {"local_steps": 3}),
        (FedMDFG, {"local_steps": 3}),
    ],
)
def test_methods_that_send_full_gradients_refuse_local_training(method, options):
    with pytest.raises(ValueError, match=f"{method.__name__} trains nothing locally: leave local_epochs and local_st"):
        fl.FederatedStrategy(method(), **options)
    fl.FederatedStrategy(method(), full_gradients=True)


def test_fedrep_refuses_fewer_passes_than_its_head_takes():
    with pytest.raises(ValueError, match=r"local_epochs must be at least the 11 passes .* of FedRep needs, found 10"):
        fl.FederatedStrategy(client=fl.algorithms.FedRep(), local_epochs=10)
    fl.FederatedStrategy(fl.algorithms.FedRep(), local_epochs=11)


def taking(base, name, **options):
    """An object whose constructor takes an argument of this name, and keeps it."""
    exec(f"def __init__(self, {name}=0.5): self.__dict__[{name!r}] = {name}", made := {})
    return type("Own", (base,), {"__init__": made["__init__"], **options})()


TAKEN = [
    (
        lambda: fl.FederatedStrategy(taking(FedAvg, "memory")),
        "memory' something else: a fit uses aggregate, .*, report itself",
    ),
    (lambda: fl.FederatedStrategy(taking(FedAvg, "report")), "report"),
    (lambda: fl.FederatedStrategy(client=taking(ClientRule, "x", refusal=3)), "refusal"),
    (lambda: fl.FederatedStrategy(client=taking(ClientRule, "scalars")), "scalars"),
    (lambda: fl.FederatedStrategy(guard=taking(fl.guards.CoordinateMedian, "needed")), "needed"),
    (lambda: fl.FederatedStrategy(sampler=taking(fl.data.UniformSampler, "select")), "select"),
    (lambda: fl.FederatedStrategy(attack=taking(fl.attacks.Attack, "report")), "report"),
]


@pytest.mark.parametrize(("make", "name"), TAKEN)
def test_names_that_a_fit_uses_itself_are_refused(make, name):
    with pytest.raises(TypeError, match=f"Own must call its '{name}"):
        make()


class Configured(Classifier):
    """Its optimizer has what it is told."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, **self.options)


@pytest.mark.parametrize(
    ("method", "optimizer", "trainer", "named"),
    [
        (FedMDFG, {"momentum": 0.9}, {}, "momentum=0.9"),
        (FedAvg, {"weight_decay": 0.01}, {"gradient_clip_val": 1.0}, "weight_decay=0.01, gradient_clip_val=1.0"),
        (FedMDFG, {}, {"limit_train_batches": 1}, "limit_train_batches=1"),
        (FedAvg, {}, {"limit_train_batches": 0.5}, "limit_train_batches=0.5"),
        (FedAvg, {}, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        (FedMDFG, {}, {"limit_train_batches": 1.0}, None),
    ],
)
def test_full_gradients_say_which_settings_have_no_effect(method, optimizer, trainer, named):
    def fit(module, **settings):
        training_only(fl.FederatedStrategy(method(), full_gradients=True), 1, **settings).fit(module, federated_blobs())
        return weights(module)

    expected = fit(fresh())
    said = f"{method.__name__} sends the gradient of all .*, so these have no effect: {named}$"
    with pytest.warns(UserWarning, match=said) if named else contextlib.nullcontext():
        assert torch.equal(fit(fresh(Configured, **optimizer), **trainer), expected)


class Watching(Callback):
    def on_after_backward(self, trainer, pl_module):
        pass


class Watched(Configured):
    def on_train_batch_start(self, batch, batch_idx):
        pass

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass

    def optimizer_step(self, *args):
        super().optimizer_step(*args)


HOOKS = r"Watched\.on_train_batch_end, Watched\.optimizer_step, Watching\.on_after_backward$"


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (FedMDFG, r"have no effect: momentum=0\.9, " + HOOKS.replace("end, ", "end, Watched.on_train_batch_start, ")),
        (Ditto, rf"^Ditto computes plain SGD steps of its own, without these: momentum=0\.9, {HOOKS}"),
        (
            fl.algorithms.FedISM,
            r"^FedISM computes gradients of its own, without these: Watching\.on_after_backward$",
        ),
    ],
)
def test_settings_and_hooks_that_a_method_leaves_out_are_named(method, said):
    trainer = training_only(fl.FederatedStrategy(method()), 1, callbacks=[Watching()])
    with pytest.warns(UserWarning, match=said):
        trainer.fit(fresh(Watched, momentum=0.9), federated_blobs())


@pytest.mark.parametrize("method", [FedMDFG, SCAFFOLD])
def test_methods_that_use_the_learning_rate_refuse_to_ascend(method):
    refused = f"{method.__name__} needs the clients' learning rate: .*, and without maximize"
    with pytest.raises(ValueError, match=refused):
        training_only(fl.FederatedStrategy(method()), 1).fit(fresh(Configured, maximize=True), federated_blobs())
