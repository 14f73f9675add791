# SPDX-License-Identifier: Apache-2.0
"""Whom a server orders what, round by round, and what comes of the answers: nodes answer at once and train nothing."""

import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import Error, Message
from in_process import InProcess, of_flower
from support import federated_blobs, fresh

import fl_lightning as fl
from fl_lightning.algorithms import FedAvg, FedMDFG
from fl_lightning.federation.flower import FairStrategy, lightning_client_app
from fl_lightning.federation.flower.messages import FAILED, Answer, Loss, Order, Origin, packed, taken, unpacked

pytestmark = pytest.mark.filterwarnings(
    "ignore:client .* is left out of round", "ignore:round \\d had", "ignore:FedMDFG asks clients for losses"
)


class Nodes:
    """Four nodes that answer at once; ``fails`` says which reply to a round's order comes in place of an answer."""

    def __init__(self, tmp_path, method=FedAvg, fails=None, **options):
        own = {"checkpoint": tmp_path, "join_timeout": 0.05, "round_timeout": 0.05, **of_flower(options)}
        strategy = fl.FederatedStrategy(method(), seed=5, **options)
        self.strategy = FairStrategy(fl.FederatedServer(fresh(), strategy, 4), **own)
        self.fails, self.orders, self.losses = fails or (lambda client, index: None), {}, []
        nodes = {100 + k: self._answer for k in range(4)}
        self.grid = InProcess(nodes, {node: {} for node in nodes}, self._arrives)

    def run(self, rounds):
        self.strategy.start(self.grid, rounds)
        return self.strategy

    def _answer(self, message, context):
        kind, client = message.metadata.message_type, message.metadata.dst_node_id - 100
        values = unpacked(message.content)
        taken(Origin, values)
        server = self.strategy.server
        if kind == "query.hello":
            frozen = server._frozen
            described = server.fit_description.state_dict()
            return Message(packed(fl.ClientIntroduction(client, "x", 10, 1, described, frozen)), reply_to=message)
        if kind == "query.loss":
            self.losses.append(taken(fl.ServerMessage, values).params)
            return Message(packed(Loss(0.1)), reply_to=message)
        order, told = taken(Order, values), taken(fl.ServerMessage, values)
        self.orders.setdefault(told.round, {})[client] = order.trains, order.stages
        failure = self.fails(client, told.round)
        if failure == "error":
            return Message(Error(FAILED, "it raised"), reply_to=message)
        when = told.round - (failure == "stale")
        found = [
            fl.EvaluationRecord(when, stage, (client,), torch.tensor([9]), {"acc": torch.tensor([0.5]).double()})
            for stage in order.stages
        ]
        update = torch.full_like(told.params, 0.1 * client + 0.1)
        sent = fl.ClientMessage(client, told.round, update, 10, 0.5, 0.5, 0.1, {}, {}, {}, 1) if order.trains else None
        return Message(packed(Answer.of(sent, found)), reply_to=message)

    def _arrives(self, order, reply):
        client, index = order.metadata.dst_node_id - 100, order.metadata.group_id
        silent = order.metadata.message_type == "train" and self.fails(client, int(index)) == "silence"
        return [] if silent else [reply]


@pytest.mark.parametrize("whose", ["all", "cohort", "none"])
def test_everybody_is_ordered_what_was_asked_for(tmp_path, whose):
    nodes = Nodes(tmp_path, evaluation=whose, evaluate_every=2, test=True, clients_per_round=2)
    strategy = nodes.run(5)
    for index, record in enumerate(strategy.records):
        cohort = set(record.client_ids)
        stages = ("val",) if index in (2, 4) and whose != "none" else ()
        expected = dict.fromkeys(cohort, (True, stages))
        if stages and whose == "all":
            expected |= dict.fromkeys(set(range(4)) - cohort, (False, stages))
        assert nodes.orders[index] == expected, index
        assert len(cohort) == 2
    end = ("test",) if whose == "none" else ("val", "test")
    assert nodes.orders[5] == dict.fromkeys(range(4), (False, end))
    assert (strategy.last_evaluation.stage, strategy.last_evaluation.round) == ("test", 5)


FAILS = {
    "all are silent": lambda client, index: "silence",
    "only who evaluates answers": lambda client, index: "error" if client == 3 else "silence",
}


@pytest.mark.parametrize("name", FAILS)
@pytest.mark.filterwarnings("ignore:the evaluation after")
def test_silence_is_no_failed_round(tmp_path, name):
    class First(fl.data.CohortSampler):
        def select(self, *_):
            return fl.data.Selection((0, 1, 2))

    strategy = Nodes(
        tmp_path, fails=FAILS[name], max_failed_rounds=1, sampler=First(), clients_per_round=3
    ).run(3)  # fmt: skip
    assert [record.skipped for record in strategy.records] == ["no usable report"] * 3


def test_rounds_without_a_node_fail_in_nothing(tmp_path):
    nodes = Nodes(tmp_path, max_failed_rounds=1)
    round_of = nodes.strategy._round

    def then_all_go():
        round_of()
        if len(nodes.strategy.records) == 2:
            nodes.grid.online.clear()

    nodes.strategy._round = then_all_go
    strategy = nodes.run(4)
    assert [len(record.client_ids) for record in strategy.records] == [4, 4, 0, 0]
    assert strategy.records[3].dropped == dict.fromkeys(range(4), "it is not connected")
    assert strategy.last_evaluation.round == 1, "an evaluation of nobody is none"


def test_an_evaluation_lacks_who_failed_and_who_is_stale(tmp_path):
    found = {(1, 1): "stale", (2, 1): "error"}
    nodes = Nodes(tmp_path, fails=lambda client, index: found.get((client, index)))
    words = r"after 1 round lacks clients: client 2 .*: it raised; client 1 .*: it has evaluated .* after 0 rounds"
    with pytest.warns(match=words):
        strategy = nodes.run(2)
    assert strategy.records[1].client_ids == (0, 1, 3), "its training counts"
    assert strategy.last_evaluation.client_ids == (0, 1, 2, 3)


def test_losses_are_those_at_the_parameters_that_the_method_asks_for(tmp_path):
    nodes = Nodes(tmp_path, FedMDFG, evaluation="none")
    before = nodes.strategy.server.message(0).params.clone()
    nodes.run(1)
    assert len(nodes.losses) >= 4
    assert not any(torch.equal(params, before) for params in nodes.losses)


@pytest.mark.parametrize(
    ("server", "client", "words"),
    [("sums", "sums", "hide single updates"), ("gram", "sums", "inner products"), ("sums", "gram", "inner products"),
     ("gram", "rows", "in clear"), ("rows", "gram", "in clear"), ("sums", "rows", "in clear")],
)  # fmt: skip
def test_a_server_sees_what_either_half_of_the_method_reads(server, client, words):
    strategy = FairStrategy(fl.FederatedServer(fresh(), fl.FederatedStrategy(), 4))
    strategy.server.algorithm.reads, strategy.server.client_rule.reads = server, client
    assert words in strategy.privacy


def test_data_of_all_clients_say_how_many_there_are(tmp_path):
    app = lightning_client_app(fresh, lambda: federated_blobs(4), fl.FederatedStrategy(seed=5), state_dir=tmp_path)
    nodes = Nodes(tmp_path)
    nodes.grid.apps[102], nodes.grid.configs[102] = app, {"client-id": 2}
    nodes.run(1)
    assert nodes.strategy._members.refused == {}
