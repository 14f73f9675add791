# SPDX-License-Identifier: Apache-2.0
"""Flower's records with anything in them, to the server and to a client, as real bytes.

What records hold once they are read is tried in ``tests/federation/test_message_checks.py``.
"""

import json
import random
import re
from collections import Counter

import hostile
import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, Context, Message, RecordDict
from in_process import InProcess, client_app, over_the_wire
from support import fresh

import fl_lightning as fl
from fl_lightning.algorithms import SCAFFOLD
from fl_lightning.federation.flower.messages import Answer, Nothing, Order, Origin, packed, taken, unpacked
from fl_lightning.federation.message_checks import MessageError
from fl_lightning.federation.messages import ClientIntroduction

WILD = 1
STRATEGY = fl.FederatedStrategy(SCAFFOLD(), seed=5)
CONTEXT = Context(7, 100 + WILD, {"client-id": WILD}, RecordDict(), {})


def written(dice, values):
    """A record of the values; sometimes with damage that its writer would not do."""
    try:
        record = packed(Nothing(), **values)
    except (TypeError, RecursionError):  # nothing that goes into a record
        record = RecordDict(
            {"fields": ConfigRecord({"format": 2, "json": "[" * 10**5}), "arrays": packed(Nothing())["arrays"]}
        )
    kind, config = dice.random(), record["fields"]
    if kind < 0.1:
        text = hostile.damaged(dice, str(config["json"]).encode())
        config["json"] = text.decode("utf-8", "replace")
    elif kind < 0.15:
        config["format"] = dice.choice((1, 3, "2", b"2", 2.0, [2]))
    elif kind < 0.2:
        del record[dice.choice(("fields", "arrays"))]
    elif kind < 0.4:
        for array in record["arrays"].values():
            if dice.random() < 0.5:
                array.shape = dice.choice(([-1], [10**12], [0], [], [2**40, 2**40, 0], list(array.shape) * 2))
            elif dice.random() < 0.5:
                array.dtype = dice.choice(("float64", "object", "complex64", "", "load", "bool", "int8"))
            else:
                array.data = dice.choice((b"", b"PK\x03\x04", b"\x80\x04.", array.data[:-1], array.data + b"1"))
            if dice.random() < 0.2:
                array.stype = dice.choice(("numpy.ndarray", "", "pickle"))
    return record


def answered(app, kind, content):
    """What a node answers to a record."""
    return over_the_wire(app(over_the_wire(Message(content, 100 + WILD, kind)), CONTEXT))


@pytest.fixture
def orders(tmp_path):
    """By their kinds, messages to a node, and the app that they are for."""
    InProcess({}, {})  # says who sends
    server, origin = fl.FederatedServer(fresh(), STRATEGY, 4), vars(Origin(4, "ab"))
    server.open_round()
    message = {**vars(server.message(WILD)), **origin}
    train = {**message, **vars(Order(True, ("val",), message["params"] + 1))}
    return client_app(tmp_path, STRATEGY), {"train": train, "query.loss": message, "query.hello": dict(origin)}


def test_no_reply_of_a_node_is_more_than_refused(orders):
    app, sent = orders
    dice, ends = random.Random(5), Counter()
    honest = {kind: unpacked(answered(app, kind, packed(Nothing(), **sent[kind])).content) for kind in sent}
    with hostile.nothing_unpickled():
        for _ in range(hostile.CASES):
            kind = dice.choice(("train", "query.hello"))
            content = written(dice, hostile.mutated(dice, honest[kind]))
            reply = over_the_wire(Message(content, 100 + WILD, kind))
            try:
                if kind == "train":
                    taken(Answer, unpacked(reply.content)).evaluation(WILD, 0, "val")
                else:
                    taken(ClientIntroduction, unpacked(reply.content))
            except MessageError as refused:
                words = str(refused)
            else:
                words = ""
            ends[words != ""] += 1
            assert len(words) <= 1200
    assert ends[True] > ends[False] > 0


def test_no_message_of_a_server_breaks_a_node(orders, tmp_path):
    app, sent = orders
    dice, ends = random.Random(6), Counter()
    honest = unpacked(answered(app, "train", packed(Nothing(), **sent["train"])).content)
    with hostile.nothing_unpickled():
        for case in range(hostile.CASES // 2):
            kind = dice.choice(list(sent))
            reply = answered(app, kind, written(dice, hostile.mutated(dice, sent[kind])))
            ends[reply.has_error()] += 1
            assert not reply.has_error() or reply.error.reason.isprintable(), case
    assert ends[True]
    assert {path.name for path in tmp_path.iterdir()} <= {"state"}
    assert all(re.fullmatch("[0-9a-f]{1,32}", path.name) for path in (tmp_path / "state").glob("*"))
    found = unpacked(answered(app, "train", packed(Nothing(), **sent["train"])).content)
    assert torch.equal(found["trained"]["update"], honest["trained"]["update"])


@pytest.mark.parametrize("name", ["../up", "0123\n", "", "g", "0" * 33, "/absolute", "..", "0/../.."])
def test_a_federation_s_name_is_no_way_to_another_folder(orders, tmp_path, name):
    order = packed(Nothing(), **{**orders[1]["train"], "federation": name})
    app = client_app(tmp_path / "here", fl.FederatedStrategy(client_optimizer_state="keep"))
    reply = answered(app, "train", order)
    assert reply.has_error()
    assert "federation of Origin must be 1 to 32 hexadecimal digits" in reply.error.reason
    assert not list(tmp_path.iterdir())


def test_deep_json_is_no_way_to_a_crash():
    for text in (
        "[" * 10**6,
        '{"a":' * 10**5,
        json.dumps({"x": {"list": [1]}, "y": {"tensor": 3}}),
        "1" * 10**6,
        "null",
    ):
        with pytest.raises(ValueError, match="the message cannot be read"):
            unpacked(
                RecordDict({"fields": ConfigRecord({"format": 2, "json": text}), "arrays": packed(Nothing())["arrays"]})
            )
