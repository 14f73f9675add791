# SPDX-License-Identifier: Apache-2.0
"""Flower's records with anything in them, to the server and to a client, as real bytes."""

import json
import random
import re
from collections import Counter
from itertools import count

import hostile
import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, Context, Message, RecordDict
from in_process import InProcess, client_app, federation, over_the_wire
from support import fresh, weights

import fl_lightning as fl
from fl_lightning.algorithms import SCAFFOLD, FedMDFG
from fl_lightning.federation.flower import FairStrategy
from fl_lightning.federation.flower.messages import Nothing, packed, unpacked

pytestmark = pytest.mark.filterwarnings(
    "ignore:client \\d .*is left out of round",
    "ignore:the evaluation after",
    "ignore:node \\d+ (cannot take part|says that)",
    "ignore:client \\d computes with other versions",
    "ignore:\\d of 4 clients have come",
    "ignore:FedMDFG asks clients",
    "ignore:round \\d (had|was left out)",
    "ignore:the length of a round must not follow",
)
WILD = 1
ROUNDS = 2


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


class Recorded:
    """What nodes have answered in a federation; again without a client that trains."""

    def __init__(self, folder, method):
        self.folder, self.method, self.replies, self.orders = folder, method, {}, {}

        def record(order, reply):
            self.replies[self.key(order)] = unpacked(reply.content)
            self.orders[self.key(order)] = unpacked(order.content)
            return [reply]

        self.strategy, _ = federation(folder, method, ROUNDS, lose=record, clients_per_round=4)
        self.known, self.numbers = {}, count()

    def strategy_of(self):
        return fl.FederatedStrategy(self.method(), seed=5)

    @staticmethod
    def key(order):
        data = order.metadata
        return data.message_type, data.group_id, data.dst_node_id - 100

    def again(self, change=lambda key, values: packed(Nothing(), **values)):
        """The same federation with other replies of client 1."""

        def node(order, context):
            key = self.key(order)
            values = self.replies.get(key, {"loss": 0.5})
            content = change(key, values) if key[2] == WILD else packed(Nothing(), **values)
            return Message(RecordDict() if content is None else content, reply_to=order)

        nodes = range(100, 104)
        strategy = FairStrategy(
            fl.FederatedServer(fresh(), self.strategy_of(), 4), self.folder / f"run {next(self.numbers)}",
            join_timeout=0.05, round_timeout=5,
        )  # fmt: skip
        strategy.start(InProcess(dict.fromkeys(nodes, node), {k: {} for k in nodes}), ROUNDS)
        return strategy

    def without(self, rounds):
        """The weights without client 1 in these rounds."""
        if rounds not in self.known:

            def nothing(key, values):
                return None if key[0] == "train" and int(key[1]) in rounds else packed(Nothing(), **values)

            self.known[rounds] = weights(self.again(nothing).model)
        return self.known[rounds]


@pytest.fixture(scope="module", params=[SCAFFOLD, FedMDFG])
def recorded(request, tmp_path_factory):
    return Recorded(tmp_path_factory.mktemp("recorded"), request.param)


def test_no_reply_of_one_node_ends_a_federation(recorded):
    dice, ends = random.Random(5), Counter()
    keys = sorted(key for key in recorded.replies if key[2] == WILD)
    if recorded.method is SCAFFOLD:  # FedMDFG asks at several points, and the last answer was kept
        assert torch.equal(weights(recorded.again().model), weights(recorded.strategy.model))
    with hostile.nothing_unpickled():
        for case in range(hostile.CASES // 6):
            target = dice.choice(keys)
            values = hostile.mutated(dice, recorded.replies[target])

            def change(key, honest, target=target, values=values):
                return written(dice, values) if key == target else packed(Nothing(), **honest)

            strategy = recorded.again(change)
            found = weights(strategy.model)
            assert [record.round for record in strategy.records] == [0, 1], case
            assert all(record.skipped is None for record in strategy.records), case
            out = frozenset(record.round for record in strategy.records if WILD in record.dropped)
            ends[bool(out)] += 1
            assert all(record.dropped.keys() <= {WILD} for record in strategy.records), case
            assert all(why and why.isprintable() for record in strategy.records for why in record.dropped.values())
            if target[0] != "train" or int(target[1]) in out:
                assert torch.equal(found, recorded.without(out)) or "hello" in target[0], (case, target)
            assert found.isfinite().all(), case
    assert ends[True]


def test_no_message_of_a_server_breaks_a_node(recorded, tmp_path):
    dice, app, ends = random.Random(6), client_app(tmp_path, recorded.strategy_of()), Counter()
    keys = sorted(key for key in recorded.orders if key[2] == WILD)
    context = Context(7, 100 + WILD, {"client-id": WILD}, RecordDict(), {})

    def answered(key, content):
        order = Message(content, 100 + WILD, key[0], group_id=key[1])
        return over_the_wire(app(over_the_wire(order), context))

    with hostile.nothing_unpickled():
        for case in range(hostile.CASES // 2):
            key = dice.choice(keys)
            reply = answered(key, written(dice, hostile.mutated(dice, recorded.orders[key])))
            ends[reply.has_error()] += 1
            assert not reply.has_error() or reply.error.reason.isprintable(), case
    assert ends[True]
    assert {path.name for path in tmp_path.iterdir()} <= {"state"}
    assert all(re.fullmatch("[0-9a-f]{1,32}", path.name) for path in (tmp_path / "state").glob("*"))
    key = ("train", "1", WILD)
    found = unpacked(answered(key, packed(Nothing(), **recorded.orders[key])).content)
    assert torch.equal(found["trained"]["update"], recorded.replies[key]["trained"]["update"])


@pytest.mark.parametrize("name", ["../up", "0123\n", "", "g", "0" * 33, "/absolute", "..", "0/../.."])
def test_a_federation_s_name_is_no_way_to_another_folder(recorded, tmp_path, name):
    key = ("train", "0", WILD)
    order = packed(Nothing(), **{**recorded.orders[key], "federation": name})
    app = client_app(tmp_path / "here", fl.FederatedStrategy(client_optimizer_state="keep"))
    context = Context(7, 100 + WILD, {"client-id": WILD}, RecordDict(), {})
    reply = app(over_the_wire(Message(order, 100 + WILD, "train", group_id="0")), context)
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
