# SPDX-License-Identifier: Apache-2.0
"""Clients that raise, die, come late or answer nonsense are left out and named; the others' round counts."""

import re

import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from in_process import client_app, federation, over_the_wire, unavailable
from support import Classifier, federated_blobs, fit, fresh, weights

import fl_lightning as fl
from fl_lightning.algorithms import SCAFFOLD, Ditto, FedAvg, FedLF, FedMDFG

pytestmark = pytest.mark.filterwarnings(
    "ignore:client \\d is left out of round",
    "ignore:the evaluation after",
    "ignore:round \\d (had|was left out)",
    "ignore:node \\d+ (cannot take part|says that it is client)",
    "ignore:\\d of 4 clients have come",
    "ignore:FedMDFG asks clients for losses",
)
EVERYBODY = {"clients_per_round": 4}


def client_of(order):
    return order.metadata.dst_node_id - 100


def in_round(order, index):
    return order.metadata.message_type == "train" and order.metadata.group_id == str(index)


def only(client, index, replies):
    """Replaces what client ``client`` replies in round ``index``."""
    return lambda order, reply: (
        replies(order, reply) if client_of(order) == client and in_round(order, index) else [reply]
    )


class Raises(Classifier):
    """Client 2 cannot read a sample in round 1."""

    def training_step(self, batch, batch_idx):
        loaders = federated_blobs(4).train_dataloader()
        theirs = loaders.dataset.tensors[0][loaders.indices(2)]
        hit = (theirs == batch[0][0]).all(1).any()
        if self.trainer.current_epoch == 1 and batch_idx == 1 and hit:
            raise LookupError("a broken sample")
        return super().training_step(batch, batch_idx)


def test_a_client_that_raises_is_left_out_as_in_a_simulation(tmp_path):
    options = {"clients_per_round": 4, "on_client_error": "drop"}
    inside = fit(fresh(Raises), 3, data=federated_blobs(4), algorithm=SCAFFOLD(), **options)
    strategy, _ = federation(tmp_path, SCAFFOLD, 3, Raises, **EVERYBODY)
    assert torch.equal(weights(strategy.model), weights(inside.module))
    assert strategy.records[1].dropped == {2: "LookupError: a broken sample"}
    assert [record.client_ids for record in strategy.records] == [(0, 1, 2, 3), (0, 1, 3), (0, 1, 2, 3)]


def garbage(order, reply):
    content = RecordDict(
        {"arrays": ArrayRecord(), "fields": ConfigRecord({"format": 2, "json": '{"trained": {"x": 1}'})}
    )
    return [over_the_wire(Message(content, reply_to=order))]


FAULTS = {
    "silence": (lambda order, reply: [], "no reply within 0.3 s"),
    "a dead node": (lambda order, reply: [unavailable(order)], "the node is unavailable"),
    "garbage": (garbage, r"the message cannot be read \(JSONDecodeError"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_unusable_reply_is_left_out_and_named(tmp_path, name):
    replies, words = FAULTS[name]
    strategy, _ = federation(tmp_path, FedLF, 3, lose=only(1, 1, replies), **EVERYBODY)
    first, second, third = strategy.records
    assert (second.client_ids, list(second.dropped)) == ((0, 2, 3), [1])
    assert re.search(words, second.dropped[1])
    assert first.client_ids == third.client_ids == (0, 1, 2, 3)
    # Whatever was wrong, the others' weights are those of a round without that client.
    quiet, _ = federation(tmp_path / "again", FedLF, 3, lose=only(1, 1, lambda order, reply: []), **EVERYBODY)
    assert torch.equal(weights(strategy.model), weights(quiet.model))


UNSAID = {
    "silence": (lambda order: None, "no reply within"),
    "nothing": (lambda order: RecordDict(), "the message cannot be read"),
}


@pytest.mark.parametrize("name", UNSAID)
def test_a_client_that_does_not_say_its_loss_again_is_left_out_of_the_round(tmp_path, name):
    made, words = UNSAID[name]

    def lose(order, reply):
        if order.metadata.message_type != "query.loss" or (client_of(order), order.metadata.group_id) != (1, "1"):
            return [reply]
        content = made(order)
        return [] if content is None else [over_the_wire(Message(content, reply_to=order))]

    strategy, _ = federation(tmp_path, FedMDFG, 3, lose=lose, **EVERYBODY)
    assert re.search(f"it was asked for its loss once more: .*{words}", strategy.records[1].dropped[1])
    assert [record.skipped for record in strategy.records] == [None] * 3
    without, _ = federation(tmp_path / "again", FedMDFG, 3, lose=only(1, 1, lambda *_: []), **EVERYBODY)
    assert torch.equal(weights(strategy.model), weights(without.model))


# ---- nodes that come and go


def test_a_node_that_comes_back_under_another_id_goes_on_as_its_client(tmp_path):
    made, seen = client_app(tmp_path, fl.FederatedStrategy(Ditto(), seed=5)), []

    def lose(order, reply):
        seen.append((order.metadata.group_id, order.metadata.dst_node_id))
        if in_round(order, 1) and order.metadata.dst_node_id == 102:  # killed, and started again at once
            grid.apps[999], grid.configs[999] = made, {"client-id": 2}
            grid.online.add(999)
            return []
        if in_round(order, 2) and order.metadata.dst_node_id == 100:
            grid.online.discard(102)  # Flower has missed its heartbeats
        return [reply]

    strategy, grid = federation(tmp_path, Ditto, 0, **EVERYBODY)
    grid.lose = lose
    strategy.start(grid, 5)
    assert strategy.records[-1].client_ids == (0, 1, 2, 3)
    assert ("4", 999) in seen
    assert ("2", 999) not in seen


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "the node's configuration must say which client it is, found {}"),
        ({"client-id": "x"}, "client-id of the node's configuration must be an integer from 0 on, found 'x'"),
        ({"client-id": 7}, "client_id and num_clients must be given.*found 7 and 4"),
    ],
)
def test_a_node_without_a_client_is_refused(tmp_path, config, words):
    strategy, grid = federation(tmp_path, FedAvg, 0, min_clients=3)
    grid.configs[100] = config
    strategy.start(grid, 1)
    (why,) = strategy._members.refused.values()
    assert re.search(words if config else re.escape(words), why)


def test_keys_bind_clients(tmp_path):
    bound = {"bind_keys": True, "min_clients": 3}
    strategy, grid = federation(tmp_path, FedAvg, 0, **bound)
    with pytest.raises(TimeoutError, match="it has no registered key, and keys say who client 0 is"):
        strategy.start(grid, 1)
    strategy, grid = federation(tmp_path, FedAvg, 0, **bound)
    grid.keys = {100 + k: bytes([k + 1]) for k in range(4)}
    strategy.start(grid, 1)
    again, other = federation(tmp_path, FedAvg, 0, **bound)
    other.keys = {**grid.keys, 101: b"x"}
    again.start(other, 2)
    assert again._members.refused == {101: "it says that it is client 1, which has another key"}
