# SPDX-License-Identifier: Apache-2.0
"""The pieces of a federation on Flower one by one: replies, nodes and orders, without a fit where possible."""

import time
from dataclasses import replace

import pytest
import torch

pytest.importorskip("flwr")
from by_hand import WithTests
from flwr.app import Context, Error, Message, RecordDict
from in_process import InProcess, client_app, over_the_wire, unavailable
from support import fresh

import fl_lightning as fl
from fl_lightning.algorithms import Ditto, FedAvg, FedMDFG
from fl_lightning.federation.flower import client_id_of
from fl_lightning.federation.flower.messages import (
    FAILED,
    Answer,
    Loss,
    Nothing,
    Order,
    Origin,
    packed,
    taken,
    unpacked,
)
from fl_lightning.federation.flower.nodes import Mailbox, Members

# ---- nodes


@pytest.mark.parametrize(
    ("config", "found"),
    [({"client-id": 3, "partition-id": 1}, 3), ({"partition-id": 1}, 1), ({"client-id": "12"}, 12),
     ({"client-id": True}, None), ({"client-id": "1x"}, None), ({"client-id": -1}, None), ({}, None)],
)  # fmt: skip
def test_a_node_says_which_client_it_is(config, found):
    context = Context(7, 1, config, RecordDict(), {})
    if found is None:
        with pytest.raises(ValueError, match="configuration must"):
            client_id_of(context)
    else:
        assert client_id_of(context) == found


def test_an_app_does_what_an_order_says(tmp_path):
    """Evaluates other parameters than it trains, in every stage that was asked for, and keeps what stays there."""
    strategy, context = fl.FederatedStrategy(Ditto(), seed=5), Context(7, 102, {"client-id": 2}, RecordDict(), {})
    app = client_app(tmp_path, strategy)
    grid_of({})  # says who sends
    server = fl.FederatedServer(fresh(), strategy, 4)
    server.open_round()
    message, other = server.message(2), server.message(2).params + 1

    def asked(trains, stages, params=None, name="ab", **changed):
        content = packed(replace(message, **changed), **vars(Order(trains, stages, params)), **vars(Origin(4, name)))
        order = over_the_wire(Message(content, 102, "train"))
        return over_the_wire(app(order, context))

    own = fl.FederatedClient(fresh(seed=77), WithTests(2), strategy, 2, 4, trainer={"accelerator": "cpu"})
    answer = taken(Answer, unpacked(asked(True, ("val", "test"), other).content))
    assert torch.equal(answer.trained["update"], own.train(message).update)
    for stage in ("val", "test"):
        wanted = own.evaluate(replace(message, params=other), stage)
        found = answer.evaluation(2, 0, stage)
        assert all(torch.equal(found.values[name], value) for name, value in wanted.values.items())
    only = taken(Answer, unpacked(asked(False, ("val",), name="cd").content))
    assert only.trained is None
    assert sorted(path.parts[-3] for path in (tmp_path / "state").rglob("*.pt")) == ["ab"]
    reply = asked(True, (), params=None, round=3, counted=2)
    assert reply.error.code == FAILED
    assert reply.error.reason.startswith("FileNotFoundError: ")


# ---- replies


def grid_of(replies):
    """A grid whose nodes reply as they are told: by node, what makes the reply to a message."""
    return InProcess(
        {node: lambda m, c, make=make: make(m) for node, make in replies.items()}, {node: {} for node in replies}
    )


def content(value=1.0):
    return lambda order: Message(packed(Loss(value)), reply_to=order)


def test_silence_is_what_does_not_come_from_the_client(monkeypatch):
    grid = grid_of({
        1: content(), 2: lambda order: Message(Error(FAILED, "own words"), reply_to=order), 3: unavailable,
        4: content(), 5: content(), 6: content(),
    })  # fmt: skip
    grid.lose = lambda order, reply: [] if order.metadata.dst_node_id == 4 else [reply]
    push, refused = grid.push_messages, {5: [""], 6: []}

    def pushed(messages):
        node = messages[0].metadata.dst_node_id
        return refused[node] if node in refused else push(messages)

    monkeypatch.setattr(grid, "push_messages", pushed)
    mailbox, began = Mailbox(grid), time.monotonic()
    contents = {node: lambda: packed(Nothing()) for node in range(1, 7)}
    found = mailbox.send(contents, "train", "7", 50.0) | mailbox.collect(0.05)
    assert time.monotonic() - began < 5
    assert {node: reply.silent for node, reply in found.items()} == {
        1: False, 2: False, 3: True, 4: True, 5: True, 6: True
    }  # fmt: skip
    assert found[2].failure == "own words"
    assert found[4].failure == "no reply within 0.05 s"
    assert [node for node, reply in found.items() if reply.content is not None] == [1]
    assert {(m.metadata.group_id, m.metadata.ttl, m.metadata.message_type) for m in grid.sent} == {("7", 50.0, "train")}


def test_who_takes_its_time_is_waited_for(monkeypatch):
    grid, looks = grid_of({1: content()}), []
    pull = grid.pull_messages
    monkeypatch.setattr(grid, "pull_messages", lambda ids: looks.append(ids) or (pull(ids) if len(looks) > 2 else []))
    mailbox = Mailbox(grid)
    mailbox.send({1: lambda: packed(Nothing())}, "train", "0", None)
    assert mailbox.collect(60.0)[1].content is not None


def test_late_replies_and_second_ones_are_nobody_s():
    grid, late = grid_of({1: content(1.0), 2: content(2.0)}), []
    grid.lose = lambda order, reply: late.append(reply) or ([] if order.metadata.dst_node_id == 2 else [reply] * 2)
    mailbox = Mailbox(grid)
    contents = {node: lambda: packed(Nothing()) for node in (1, 2)}
    mailbox.send(contents, "train", "0", None)
    first = mailbox.collect(0.05)
    assert [reply.content is None for reply in (first[1], first[2])] == [False, True]
    grid._inbox += late
    grid.lose = None
    mailbox.send({1: contents[1]}, "train", "1", None)
    assert mailbox.collect(None).keys() == {1}
    assert mailbox.look() == {}


# ---- who is who


def members_of(configs, num_clients=3, patience=0.2, keys=None, method=FedAvg, **wrong):
    """Members of a grid whose nodes introduce themselves as these clients; ``wrong`` are layouts by node."""

    def made(rule):
        return fl.FederatedServer(fresh(), fl.FederatedStrategy(rule(), seed=5), num_clients)

    server = made(method)

    def hello(order):
        node = order.metadata.dst_node_id
        other = made((wrong or {}).get(f"n{node}", method))
        told = fl.ClientIntroduction(configs[node], "x", 10, 2, other.fit_description.state_dict(), server._frozen)
        return Message(packed(told), reply_to=order)

    grid = grid_of(dict.fromkeys(configs, hello))
    return Members(grid, server, vars(Origin(num_clients, "ab")), patience, keys), grid


def asked(grid):
    return [message.metadata.dst_node_id for message in grid.sent]


@pytest.mark.filterwarnings("ignore:node 5 says that it is client 1")
def test_a_second_node_of_a_client_waits_until_the_first_has_gone():
    members, grid = members_of({3: 0, 4: 1, 5: 1, 6: 2})
    grid.online -= {5}
    for _ in range(3):
        assert not members.look()
        grid.online |= {5}
    assert members.nodes == {0: 3, 1: 4, 2: 6}
    assert asked(grid) == [3, 4, 6, 5], "nobody is asked twice"
    grid.online -= {4}
    members.look()
    assert members.nodes == {0: 3, 1: 5, 2: 6}
    grid.online -= {5}
    members.look()
    assert members.nodes == {0: 3, 2: 6}
    grid.online |= {4}  # it comes back, and is asked again; then the other one
    members.look()
    grid.online |= {5}
    members.look()
    assert members.nodes == {0: 3, 1: 4, 2: 6}
    grid.online -= {4, 5}
    members.look()
    assert members.nodes == {0: 3, 2: 6}, "a rival that has gone takes nobody's place"


@pytest.mark.filterwarnings("ignore:node 4 cannot take part", "ignore:1 of 3 clients")
def test_a_node_is_refused_as_long_as_it_is_there():
    members, grid = members_of({3: 0, 4: 1}, n4=FedMDFG)
    for _ in range(3):
        members.look()
    assert members.nodes == {0: 3}
    assert members.refused.keys() == {4}
    assert members.refused[4].startswith("it is client 1; from server to client, method: FedAvg")
    assert asked(grid) == [3, 4]
    members.gather(1, 0.0)
    with pytest.raises(
        TimeoutError, match="1 of 3 clients have come within 0 s, and min_clients=2; refused were node 4"
    ):
        members.gather(2, 0.0)
    grid.online -= {4}
    members.look()
    assert members.refused == {}


def test_who_does_not_answer_is_waited_for_once_and_asked_again(caplog):
    members, grid = members_of({3: 0, 4: 1})
    grid.lose = lambda order, reply: [] if order.metadata.dst_node_id == 4 else [reply]
    assert members.look()
    assert members.look()
    assert asked(grid) == [3, 4]
    time.sleep(0.25)
    assert not members.look(), "nobody waits for it a second time"
    assert asked(grid) == [3, 4, 4]
    began = time.monotonic()
    assert members.connected((0, 1), 1, 5.0) == {0: 3}
    assert time.monotonic() - began < 2
    began = time.monotonic()
    with caplog.at_level("INFO"):
        assert members.connected((0, 1), 2, 0.1) == {0: 3}
    assert caplog.messages.count("1 of 2 clients are connected: waiting 0.1 s at most") == 1
    assert time.monotonic() - began >= 0.1, "two were wanted"
    grid.lose = lambda order, reply: [unavailable(order)]
    time.sleep(0.25)
    members.look()
    assert 4 not in members.refused, "it could not be reached, which it is not refused for"
    grid.lose = None
    time.sleep(0.25)
    members.look()
    assert members.nodes == {0: 3, 1: 4}
