# SPDX-License-Identifier: Apache-2.0
"""A server without a transport, and clients that it only knows by their messages, give the bits of ``trainer.fit``."""

import importlib
import re
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from by_hand import Federation, Own, own_loader, wired
from sites import of
from support import Adapted, Classifier, federated_blobs, fit, fresh, reload, training_only, weights

import fl_lightning as fl
from fl_lightning.algorithms import SCAFFOLD, Ditto, FedAvg, FedLF

CPU = {"accelerator": "cpu"}


def federation(method=FedAvg, data=Own, trainer=None, rounds=3, folder=None, **options):
    """Four clients, three in a round."""
    strategy = fl.FederatedStrategy(method(), **{"clients_per_round": 3, "seed": 5, **options})
    return Federation(strategy, data=data, trainer=trainer, rounds=rounds, folder=folder)


def test_guards_see_the_answers():
    guards = [fl.guards.AdaptiveNormClipping(rate=1.0), fl.guards.CosineTrust(client=0)]
    options = {"clients_per_round": 4, "guard": guards}
    inside = fit(fresh(), 3, data=federated_blobs(4), algorithm=FedLF(), **options)
    first, again, other = (federation(FedLF, **each) for each in (options, options, {"clients_per_round": 4}))
    first.round()
    state = reload(first.server.state_dict())
    assert state["guards"]["AdaptiveNormClipping 0"]
    again.server.load_state_dict(state)
    assert torch.equal(weights(again.run(2)), weights(inside.module))
    assert again.server.last_round.dropped == inside.strategy.last_round.dropped != {}
    with pytest.warns(UserWarning, match="guard: .*CosineTrust.* became"):
        other.server.load_state_dict(state)


def test_data_of_all_and_of_one_are_evaluated_alike():
    apart, strategy, data = federation(), fl.FederatedStrategy(seed=5), federated_blobs(4)
    message, own = apart.server.evaluation_message(2), apart.clients[2]
    one = fl.FederatedClient(fresh(seed=9), data, strategy, 2, trainer=CPU)
    found, other = own.evaluate(message), one.evaluate(message)
    assert found.client_ids == other.client_ids == (2,)
    assert all(torch.equal(found.values[name], values) for name, values in other.values.items())
    assert own.introduction().size == one.introduction().size
    assert own.evaluate(message, "test") is None  # it has no such data
    bare = fl.ClientModule(torch.nn.Linear(12, 4))
    assert fl.FederatedClient(bare, own_loader(2, data), strategy, 2, 4).evaluate(message) is None


@pytest.mark.filterwarnings(r"ignore:client \d is left out", "ignore:round 1 had")
def test_a_state_goes_on_bit_for_bit(tmp_path):
    def run(rounds, state=None):
        folder = tmp_path / ("cut" if len(rounds) < 4 else "whole")
        apart = federation(SCAFFOLD, rounds=4, server_optimizer=torch.optim.Adam, min_clients=3, folder=folder)
        if state is not None:
            apart.server.load_state_dict(state)
        for k in rounds:
            apart.round(lost=[apart.server.open_round()[0]] if k == 1 else [])
        return apart.server

    whole = run(range(4))
    server = run(range(2, 4), reload(run(range(2)).state_dict()))
    assert whole.last_round.skipped_rounds == server.last_round.skipped_rounds == 1
    one, two = whole.module_state_dict(), server.module_state_dict()
    assert all(torch.equal(one[name], value) for name, value in two.items())
    assert torch.equal(whole.client_rule.c, server.client_rule.c)


def sites(names, method):
    """A server and the clients of these names, of one strategy."""
    strategy, several = fl.FederatedStrategy(method(), seed=5), range(len(names))
    server = fl.FederatedServer(fresh(), strategy, len(names))
    return server, [fl.FederatedClient(fresh(), of(names), strategy, k, trainer=CPU) for k in several]


def one_round(server, clients):
    server.close_round({k: clients[k].train(server.message(k)) for k in server.open_round()})


@pytest.mark.parametrize("others", ["acd", "abcd", "ab", "ca"])
@pytest.mark.filterwarnings("ignore:the fit goes on with other settings")
def test_a_federation_goes_on_with_other_clients_as_a_fit_does(tmp_path, others):
    method = partial(SCAFFOLD, weighting="samples")

    def run(names, state=None):
        server, clients = sites(names, method)
        if state is not None:
            server.load_state_dict(state)
        for client in reversed(clients):
            server.register(wired(client.introduction()))
        for _ in range(2):
            one_round(server, clients)
        return server

    def fit_on(names, rounds, path=None):
        trainer = training_only(fl.FederatedStrategy(method(), seed=5), rounds)
        trainer.fit(fresh(), of(names), ckpt_path=path)
        return trainer

    server = run(others, reload(run("abc").state_dict()))
    fit_on("abc", 2).save_checkpoint(tmp_path / "two.ckpt")
    trainer = fit_on(others, 4, tmp_path / "two.ckpt")
    inside = trainer.strategy.client_rule
    assert torch.equal(weights(server.module), weights(trainer.lightning_module))
    assert torch.equal(server.client_rule.c, inside.c)
    assert all(torch.equal(server.client_rule.c_i[k], inside.c_i[k]) for k in range(len(others)))
    back = run("abcd", reload(server.state_dict()))
    fit_on_path = tmp_path / "four.ckpt"
    trainer.save_checkpoint(fit_on_path)
    assert torch.equal(weights(back.module), weights(fit_on("abcd", 6, fit_on_path).lightning_module))


@pytest.mark.parametrize("by_name", [True, False])
def test_a_name_counts_once_and_only_where_it_says_who_a_client_is(by_name):
    server, made = sites("abc", SCAFFOLD)
    a, b, c = (each.introduction() for each in made)
    for introduction in (a, b, c):
        server.register(introduction)
    one_round(server, made)
    held = server.client_rule.c_i
    other, _ = sites("abc", SCAFFOLD)
    other.load_state_dict(reload(server.state_dict()))
    other.register(replace(c, client_id=0), by_name)
    assert torch.equal(other.client_rule.c_i[0], held[2 if by_name else 0])
    other.register(replace(b, name="c"), by_name)  # another one is called so already
    assert torch.equal(other.client_rule.c_i[0], held[2 if by_name else 0])
    assert (1 in other.client_rule.c_i) is not by_name


def test_what_clients_keep_stays_under_their_ids(tmp_path):
    def introductions(names, server):
        return [server.refusal(client.introduction()) for client in sites(names, Ditto)[1]]

    (server, clients), (other, _) = sites("abc", Ditto), sites("abc", Ditto)
    for client in clients:
        server.register(client.introduction())
    other.load_state_dict(reload(server.state_dict()))
    words = r"client 1 or the name 'c' is another one in the checkpoint, .* let each have its id of before"
    first, second, third = introductions("acd", other)
    assert first is None
    assert re.search(words, second)
    assert "the name 'd'" in third
    assert introductions("abc", other) == [None] * 3


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_the_server_computes_in_the_clients_numbers(precision):
    inside = fit(fresh(), 2, data=federated_blobs(4), algorithm=FedLF(), precision=precision)
    apart = federation(FedLF, rounds=2, trainer={"precision": precision})
    assert torch.equal(weights(apart.run(2)), weights(inside.module))


def test_adapters_of_another_rank_are_refused_with_a_sentence():
    strategy = fl.FederatedStrategy()
    server = fl.FederatedServer(Adapted(2), strategy, 4)
    for rank, refused in ((2, False), (3, True)):
        found = fl.FederatedClient(Adapted(rank), Own(1), strategy, 1, 4).introduction()
        words = server.refusal(found) or ""
        assert ("net.0.lora_A.default.weight [2, 12] became" in words) == refused
        assert ("adapters: the mean of factors needs one rank and the same adapted layers" in words) == refused


def test_other_kernels_are_told_once(recwarn):
    apart = federation()
    server, clients = apart.server, apart.clients
    own = server.fit_description.versions["kernels"]
    for client in clients:
        found = client.introduction()
        found.description["versions"] = {**found.description["versions"], "kernels": "others"}
        assert server.refusal(found) is None
    found.description["versions"]["fl_lightning"] = "9.9"
    assert re.search(r"version: fl_lightning .* became 9\.9", server.refusal(found))
    assert [str(w.message).partition(": its numbers")[0] for w in recwarn.list] == [
        f"client 0 computes with other versions or kernels than the server (versions: kernels: {own} became others)"
    ]


def test_answers_that_nobody_asked_for_are_refused():
    apart = federation()
    server, clients = apart.server, apart.clients
    with pytest.raises(ValueError, match="close_round needs a round that open_round has opened, found none"):
        server.close_round({})
    cohort = server.open_round()
    outside = next(k for k in range(4) if k not in cohort)
    answer = clients[outside].train(server.message(outside))
    for name, given in (("answers", ({outside: answer},)), ("missing", ({}, {outside: "no answer"}))):
        with pytest.raises(ValueError, match=rf"{name} must be of clients of the round, .*found \[{outside}\]"):
            server.close_round(*given)
    with pytest.raises(TypeError, match=r"answers of close_round must be a mapping, found \[ClientMessage"):
        server.close_round([answer])
    with pytest.raises(TypeError, match=r"missing of close_round must be None or a mapping, found \[3\]"):
        server.close_round({}, [3])


def test_no_round_follows_the_last():
    server = fl.FederatedServer(Classifier(), fl.FederatedStrategy(), 3, rounds=1)
    server.round = 1
    with pytest.raises(ValueError, match="rounds must be more than the 1 that are closed, found 1"):
        server.open_round()


class Stateful(fl.algorithms.ClientRule):
    def commit(self, cohort):
        pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"client": Stateful()}, "server and clients .* cannot work apart: Stateful has a commit"),
        (
            {"partition": fl.data.IID(3)},
            r"partition of FederatedStrategy must be left out .*, found IID\(num_clients=3",
        ),
    ],
)
def test_strategies_that_cannot_be_meant_are_refused(options, words):
    strategy = fl.FederatedStrategy(**options)
    with pytest.raises(ValueError, match=words):
        fl.FederatedServer(Classifier(), strategy, 3)
    with pytest.raises(ValueError, match=words):
        fl.FederatedClient(Classifier(), Own(1), strategy, 1, 3)


METHODS = {
    "state": {"algorithm": partial(SCAFFOLD, weighting="samples")},
    "personal models": {"algorithm": Ditto},
    "personal models in files": {"algorithm": partial(Ditto, directory="models")},
    "history": {"algorithm": FedLF, "client_optimizer_state": "keep"},
    "a pair with a guard": {"algorithm": FedLF, "client": SCAFFOLD, "guard": fl.guards.AdaptiveNormClipping},
    "collusion": {"algorithm": FedAvg, "attack": partial(fl.attacks.ALIE, (0, 2))},
    "wrong labels": {"algorithm": FedAvg, "attack": partial(fl.attacks.LabelFlip, (1,), num_classes=4)},
}


@pytest.mark.parametrize("name", METHODS)
def test_one_strategy_serves_a_trainer_a_server_and_clients(tmp_path, monkeypatch, name):
    """A fit lies before every round of the federation, and nobody notices the others."""
    monkeypatch.chdir(tmp_path)
    options = {key: value() if callable(value) else value for key, value in METHODS[name].items()}
    strategy = fl.FederatedStrategy(**options)
    data = federated_blobs(4)

    def fitted():
        module = fresh(momentum=0.5)
        training_only(strategy, 3).fit(module, data)
        return weights(module)

    expected = fitted()
    server = fl.FederatedServer(fresh(momentum=0.5), strategy, 4, rounds=3)
    clients = [fl.FederatedClient(fresh(seed=k, momentum=0.5), data, strategy, k, trainer=CPU) for k in range(4)]
    for _ in range(3):
        assert torch.equal(fitted(), expected)
        files = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
        one_round(server, clients)
        assert files == {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    server.finish()
    assert torch.equal(weights(server.module), expected)


@pytest.mark.parametrize(("adapter", "library"), [("flower", "flwr"), ("nvflare", "nvflare.client")])
def test_a_missing_library_is_named(monkeypatch, adapter, library):
    monkeypatch.setitem(sys.modules, library, None)
    for name in [name for name in sys.modules if name.startswith(f"fl_lightning.federation.{adapter}")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=rf"needs \w+: pip install '\.\[{adapter}\]' in a checkout"):
        importlib.import_module(f"fl_lightning.federation.{adapter}")
