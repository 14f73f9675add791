# SPDX-License-Identifier: Apache-2.0
"""Which methods combine, and which arguments FederatedStrategy takes."""

import contextlib
import functools

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support import Classifier, Manual, federated_blobs, fresh, train, training_only, weights

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


def taking(base, name, **options):
    """An object whose constructor takes an argument of this name, and keeps it."""
    exec(f"def __init__(self, {name}=0.5): self.__dict__[{name!r}] = {name}", made := {})
    return type("Own", (base,), {"__init__": made["__init__"], **options})()


COUNTS = ("clients_per_round", "local_epochs", "local_steps", "min_clients", "max_failed_rounds")
LOCAL = "trains nothing locally: leave local_epochs and local_steps"
AT_ONCE = [
    *(({name: 0}, rf"^{name}( of FederatedStrategy)? must be .*, found 0$") for name in COUNTS),
    ({"algorithm": fl.algorithms.FCFL(), "local_epochs": 2}, f"FCFL {LOCAL}"),
    ({"algorithm": fl.algorithms.FairReg(), "local_steps": 3}, f"FairReg {LOCAL}"),
    ({"algorithm": FedMDFG(), "local_steps": 3}, f"FedMDFG {LOCAL}"),
    ({"client": fl.algorithms.FedRep(), "local_epochs": 10}, r"be at least the 11 passes .* of FedRep needs, found 10"),
    (
        {"algorithm": functools.partial(taking, FedAvg, "memory")},
        "'memory' something else: a fit uses aggregate, .*, report itself",
    ),
    ({"algorithm": functools.partial(taking, FedAvg, "report")}, "Own must call its 'report"),
    ({"client": functools.partial(taking, ClientRule, "x", refusal=3)}, "Own must call its 'refusal"),
    ({"client": functools.partial(taking, ClientRule, "scalars")}, "Own must call its 'scalars"),
    ({"guard": functools.partial(taking, fl.guards.CoordinateMedian, "needed")}, "Own must call its 'needed"),
    ({"sampler": functools.partial(taking, fl.data.UniformSampler, "select")}, "Own must call its 'select"),
    ({"attack": functools.partial(taking, fl.attacks.Attack, "report")}, "Own must call its 'report"),
]
NO_OPTIMIZER = r"server_optimizer must make a torch\.optim\.Optimizer from parameters, found"
LBFGS = r"server_optimizer must make an optimizer that steps on one gradient, .*found LBFGS, .*take torch\.optim"
IN_A_FIT = [
    ({"clients_per_round": 7}, "clients_per_round must be at most the 6 clients, found 7"),
    ({"server_optimizer": lambda parameters: None}, NO_OPTIMIZER),
    ({"server_optimizer": lambda parameters: list(parameters)}, NO_OPTIMIZER),
    ({"server_optimizer": torch.optim.LBFGS}, LBFGS),
    ({"server_optimizer": torch.optim.SparseAdam}, "server_optimizer must take dense gradients, .*found SparseAdam"),
]


@pytest.mark.parametrize(("options", "words"), AT_ONCE, ids=lambda value: str(value)[:40])
def test_arguments_that_make_no_sense_are_refused_at_once(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        fl.FederatedStrategy(**{k: v() if isinstance(v, functools.partial) else v for k, v in options.items()})


@pytest.mark.parametrize(("options", "words"), IN_A_FIT, ids=lambda value: str(value)[:40])
def test_others_are_refused_before_the_first_round(options, words):
    module = fresh()
    with pytest.raises((TypeError, ValueError), match=words):
        train(module, 1, **options)
    assert torch.equal(weights(module), weights(fresh()))


RIGHT = [
    {"algorithm": FedMDFG(), "full_gradients": True},
    {"algorithm": fl.algorithms.FedRep(), "local_epochs": 11},
    *({"server_optimizer": functools.partial(kind, lr=0.01)} for kind in (torch.optim.AdamW, torch.optim.Rprop)),
]


@pytest.mark.parametrize("options", RIGHT, ids=lambda value: str(value)[:40])
def test_others_are_not(options):
    assert train(rounds=1, limit_train_batches=None, **options).strategy.last_round.client_ids


@pytest.mark.parametrize(("value", "sampled"), [(2, 2), (0.5, 3), (1.0, 6)])
def test_clients_per_round_counts_or_shares(value, sampled):
    assert len(train(rounds=1, clients_per_round=value).strategy.last_round.client_ids) == sampled


class Configured(Classifier):
    """Its optimizer has what it is told."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, **self.options)


class Watched(Configured):
    def on_train_batch_start(self, batch, batch_idx):
        pass

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass

    def optimizer_step(self, *args):
        super().optimizer_step(*args)


class Watching(Callback):
    def on_after_backward(self, trainer, pl_module):
        pass


NO_EFFECT = r"sends the gradient of all .*, so these have no effect: "
HOOKS = r"Watched\.on_train_batch_end, Watched\.optimizer_step, Watching\.on_after_backward"
LEFT_OUT = [
    (FedMDFG, Configured, {"momentum": 0.9}, {}, f"{NO_EFFECT}momentum=0.9"),
    (
        FedAvg, Configured, {"weight_decay": 0.01}, {"gradient_clip_val": 1.0},
        f"{NO_EFFECT}weight_decay=0.01, gradient_clip_val=1.0",
    ),
    (FedMDFG, Configured, {}, {"limit_train_batches": 1}, f"{NO_EFFECT}limit_train_batches=1"),
    (FedAvg, Configured, {}, {"limit_train_batches": 0.5}, f"{NO_EFFECT}limit_train_batches=0.5"),
    (FedAvg, Configured, {}, {"accumulate_grad_batches": 2}, f"{NO_EFFECT}accumulate_grad_batches=2"),
    (FedMDFG, Configured, {}, {"limit_train_batches": 1.0}, None),
    (
        FedMDFG, Watched, {"momentum": 0.9}, {"callbacks": [Watching()]},
        rf"{NO_EFFECT}momentum=0\.9, " + HOOKS.replace("end, ", "end, Watched.on_train_batch_start, "),
    ),
    (
        Ditto, Watched, {"momentum": 0.9}, {"callbacks": [Watching()]},
        rf"computes plain SGD steps of its own, without these: momentum=0\.9, {HOOKS}",
    ),
    (
        functools.partial(Ditto, personal_lr=0.1), Classifier, {"optimizer": "Adam", "lr": 0.01}, {},
        "computes plain SGD steps of its own, without these: Adam",
    ),
    (
        fl.algorithms.FedISM, Watched, {}, {"callbacks": [Watching()]},
        r"computes gradients of its own, without these: Watching\.on_after_backward",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("method", "module", "optimizer", "trainer", "said"), LEFT_OUT)
def test_settings_and_hooks_that_a_method_leaves_out_are_named(method, module, optimizer, trainer, said):
    full = {"full_gradients": True} if module is Configured else {}
    name = getattr(method, "func", method).__name__
    said = pytest.warns(UserWarning, match=f"^{name} {said}$") if said else contextlib.nullcontext()
    with said:
        found = train(fresh(module, **optimizer), 1, algorithm=method(), **full, **trainer).module
    if full:
        assert torch.equal(weights(found), weights(train(rounds=1, algorithm=method(), **full).module))


@pytest.mark.parametrize("method", [FedMDFG, SCAFFOLD])
def test_methods_that_use_the_learning_rate_refuse_to_ascend(method):
    with pytest.raises(ValueError, match=f"{method.__name__} needs the clients' learning rate: .*, and without maxim"):
        train(fresh(Configured, maximize=True), 1, algorithm=method())
