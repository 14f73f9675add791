# SPDX-License-Identifier: Apache-2.0
"""A server without a transport, and clients that it only knows by their messages, give the bits of ``trainer.fit``."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from by_hand import Own, own_loader, wired
from sites import of
from support import Adapted, Classifier, federated_blobs, fit, fresh, reload, training_only, weights
from watching import Records

import fl_lightning as fl
from fl_lightning.algorithms import SCAFFOLD, Ditto, FedAvg, FedLF, FedMDFG

CPU = {"accelerator": "cpu"}


def made_clients(method, options=None, folder=None, data=Own, trainer=CPU):
    strategy, options = fl.FederatedStrategy(method(), seed=5), options or {}
    return [
        fl.FederatedClient(fresh(seed=50 + k, **options), data(k), strategy, k, 4, trainer, folder) for k in range(4)
    ]


def made_server(method, options=None, rounds=3, precision="32-true", **shared):
    strategy = fl.FederatedStrategy(method(), **{"clients_per_round": 3, "seed": 5, **shared})
    return fl.FederatedServer(fresh(**(options or {})), strategy, 4, precision, rounds=rounds)


def one_round(server, clients, lost=()):
    answers = {}
    for client in reversed(server.open_round()):
        answers[client] = wired(clients[client].train(wired(server.message(client))))

    def losses_at(params, ids):
        return {k: clients[k].loss(replace(server.message(k), params=params)) for k in ids}

    kept = {client: answer for client, answer in answers.items() if client not in lost}
    return server.close_round(kept, dict.fromkeys(lost, "lost on the way"), losses_at)


@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD, Ditto, FedLF, FedMDFG])
def test_the_weights_records_and_values_are_those_of_a_fit(method):
    options, last = {"norm": True}, Records()
    inside = fit(fresh(**options), 3, data=federated_blobs(4), algorithm=method(), callbacks=[last])
    server, clients = made_server(method, options), made_clients(method, options)
    for client in clients:
        server.register(wired(client.introduction()))
    records = [one_round(server, clients) for _ in range(3)]
    found = [clients[k].evaluate(server.evaluation_message(k)) for k in range(4)]
    server.finish()
    assert torch.equal(weights(server.module), weights(inside.module))
    for ours, theirs in zip(records, last.rounds, strict=True):
        assert (ours.client_ids, ours.step_norm, ours.local_steps, ours.train_loss, ours.layer_conflicts) == (
            theirs.client_ids, theirs.step_norm, theirs.local_steps, theirs.train_loss, theirs.layer_conflicts,
        )  # fmt: skip
    for name, values in last.evaluations[-1].values.items():
        assert torch.equal(torch.cat([record.values[name] for record in found]), values), name
    assert torch.equal(torch.cat([record.sizes for record in found]), last.evaluations[-1].sizes)
    assert [record.client_ids for record in found] == [(0,), (1,), (2,), (3,)]


def test_guards_see_the_answers():
    guards = [fl.guards.AdaptiveNormClipping(rate=1.0), fl.guards.CosineTrust(client=0)]
    options = {"clients_per_round": 4, "guard": guards}
    inside = fit(fresh(), 3, data=federated_blobs(4), algorithm=FedLF(), **options)
    server, clients = made_server(FedLF, **options), made_clients(FedLF)
    one_round(server, clients)
    state = reload(server.state_dict())
    assert state["guards"]["AdaptiveNormClipping 0"]
    server = made_server(FedLF, **options)
    server.load_state_dict(state)
    for _ in range(2):
        one_round(server, clients)
    server.finish()
    assert torch.equal(weights(server.module), weights(inside.module))
    assert server.last_round.dropped == inside.strategy.last_round.dropped != {}
    other = made_server(FedLF, clients_per_round=4)
    with pytest.warns(UserWarning, match="guard: .*CosineTrust.* became"):
        other.load_state_dict(state)


def test_data_of_all_and_of_one_are_evaluated_alike():
    server = made_server(FedAvg)
    message = server.evaluation_message(2)
    own, (one,) = made_clients(FedAvg)[2], [
        fl.FederatedClient(fresh(seed=9), federated_blobs(4), fl.FederatedStrategy(seed=5), 2, trainer=CPU)
    ]  # fmt: skip
    found, other = own.evaluate(message), one.evaluate(message)
    assert found.client_ids == other.client_ids == (2,)
    assert all(torch.equal(found.values[name], values) for name, values in other.values.items())
    assert own.introduction().size == one.introduction().size
    assert own.evaluate(message, "test") is None  # it has no such data
    bare = fl.ClientModule(torch.nn.Linear(12, 4))
    bare = fl.FederatedClient(bare, own_loader(2, federated_blobs(4)), fl.FederatedStrategy(), 2, 4)
    assert bare.evaluate(message) is None


@pytest.mark.filterwarnings("ignore:client \\d is left out", "ignore:round 1 had")
def test_a_state_goes_on_bit_for_bit(tmp_path):
    def run(server, clients, rounds):
        for k in rounds:
            one_round(server, clients, lost=[server.open_round()[0]] if k == 1 else [])
        return server

    def begun():
        server = made_server(SCAFFOLD, rounds=4, server_optimizer=torch.optim.Adam, min_clients=3)
        clients = made_clients(SCAFFOLD, folder=tmp_path)
        for client in clients:
            server.register(client.introduction())
        return server, clients

    whole = run(*begun(), range(4))
    state = reload(run(*begun(), range(2)).state_dict())
    server = made_server(SCAFFOLD, rounds=4, server_optimizer=torch.optim.Adam, min_clients=3)
    server.load_state_dict(state)
    run(server, made_clients(SCAFFOLD, folder=tmp_path), range(2, 4))
    assert whole.last_round.skipped_rounds == server.last_round.skipped_rounds == 1
    one, two = whole.module_state_dict(), server.module_state_dict()
    assert all(torch.equal(one[name], value) for name, value in two.items())
    assert torch.equal(whole.client_rule.c, server.client_rule.c)


def sites(names, method):
    """A server and the clients of these names, of one strategy."""
    strategy, several = fl.FederatedStrategy(method(), seed=5), range(len(names))
    server = fl.FederatedServer(fresh(), strategy, len(names))
    return server, [fl.FederatedClient(fresh(), of(names), strategy, k, trainer=CPU) for k in several]


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
    server = made_server(FedLF, rounds=2, precision=precision)
    clients = made_clients(FedLF, {}, trainer={**CPU, "precision": precision})
    for _ in range(2):
        one_round(server, clients)
    server.finish()
    assert torch.equal(weights(server.module), weights(inside.module))


def test_adapters_of_another_rank_are_refused_with_a_sentence():
    strategy = fl.FederatedStrategy()
    server = fl.FederatedServer(Adapted(2), strategy, 4)
    for rank, refused in ((2, False), (3, True)):
        found = fl.FederatedClient(Adapted(rank), Own(1), strategy, 1, 4).introduction()
        words = server.refusal(found) or ""
        assert ("net.0.lora_A.default.weight [2, 12] became" in words) == refused
        assert ("adapters: the mean of factors needs one rank and the same adapted layers" in words) == refused


def test_other_kernels_are_told_once(recwarn):
    server, clients = made_server(FedAvg), made_clients(FedAvg)
    own = server.fit_description.versions["kernels"]
    for client in clients:
        found = client.introduction()
        found.description["versions"] = {**found.description["versions"], "kernels": "others"}
        assert server.refusal(found) is None
    assert [str(w.message).partition(": its numbers")[0] for w in recwarn.list] == [
        f"client 0 computes with other versions or kernels than the server (versions: kernels: {own} became others)"
    ]


def test_answers_that_nobody_asked_for_are_refused():
    server, clients = made_server(FedAvg), made_clients(FedAvg)
    with pytest.raises(ValueError, match="close_round needs a round that open_round has opened, found none"):
        server.close_round({})
    cohort = server.open_round()
    outside = next(k for k in range(4) if k not in cohort)
    answer = clients[outside].train(server.message(outside))
    with pytest.raises(ValueError, match=rf"answers must be of clients of the round, .*found \[{outside}\]"):
        server.close_round({outside: answer})
    with pytest.raises(TypeError, match=r"answers of close_round must be a mapping, found \[ClientMessage"):
        server.close_round([answer])
    with pytest.raises(TypeError, match=r"missing of close_round must be None or a mapping, found \[3\]"):
        server.close_round({}, [3])


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
    "history": {"algorithm": FedLF, "client_optimizer_state": "keep"},
    "a pair with a guard": {"algorithm": FedLF, "client": SCAFFOLD, "guard": fl.guards.AdaptiveNormClipping},
    "collusion": {"algorithm": FedAvg, "attack": partial(fl.attacks.ALIE, (0, 2))},
    "wrong labels": {"algorithm": FedAvg, "attack": partial(fl.attacks.LabelFlip, (1,), num_classes=4)},
}


@pytest.mark.parametrize("name", METHODS)
def test_one_strategy_serves_a_trainer_a_server_and_clients(name):
    """A fit lies before every round of the federation, and nobody notices the others."""
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
        one_round(server, clients)
    server.finish()
    assert torch.equal(weights(server.module), expected)
