# SPDX-License-Identifier: Apache-2.0
"""Rows of a round get to the ranks that hold their columns, whoever trains how many clients and how fast."""

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Barrier, Event, Lock

import pytest
import torch
from torch import nn

from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.ranks.column_rows import ColumnRows, RowExchange
from fl_lightning.core.errors import RankError
from fl_lightning.core.updates import Columns

SECONDS = 30
FEATURES = 40_000


class Network:
    """What threads exchange in place of processes."""

    def __init__(self, size, damage=0.0):
        self.size, self.notes, self.lock, self.damage = size, {}, Lock(), damage
        self.mail, self.meeting, self.table = {}, Barrier(size), [None] * size

    def box(self, *key):
        with self.lock:
            return self.mail.setdefault(key, Queue())


class Sent:
    """An exchange of one rank; tensors are read and written when a receiver looks or waits, as late as can be."""

    def __init__(self, waiting, taken):
        self._waiting, self._taken = waiting, taken

    def _take(self, box, tensor):
        theirs, damage, taken = box.get(timeout=SECONDS)
        tensor.copy_(theirs + damage)
        taken.set()

    def is_over(self):
        for box, tensor in list(self._waiting.items()):
            if not box.empty():
                self._take(box, tensor)
                del self._waiting[box]
        return not self._waiting and all(taken.is_set() for taken in self._taken)

    def wait(self):
        for box, tensor in self._waiting.items():
            self._take(box, tensor)
        self._waiting = {}
        assert all(taken.wait(SECONDS) for taken in self._taken)


class Ranks:
    """One thread of them, as the exchange sees its process."""

    def __init__(self, network, rank):
        self._network, self.rank, self.size = network, rank, network.size
        self.bytes = 0

    def gather(self, value):
        self._network.table[self.rank] = value
        self._network.meeting.wait(SECONDS)
        found = list(self._network.table)
        self._network.meeting.wait(SECONDS)
        return found

    def transfer(self, sends, receives, number=0):
        counts, taken = {}, []
        for tensor, rank in sends:
            assert tensor.is_contiguous()
            counts[rank] = counts.get(rank, -1) + 1
            taken.append(Event())
            damage = 0.0 if counts[rank] else self._network.damage
            self._network.box(self.rank, rank, number, counts[rank]).put((tensor, damage, taken[-1]))
            self.bytes += tensor.numel() * tensor.element_size()
        waiting, counts = {}, {}
        for tensor, rank in receives:
            counts[rank] = counts.get(rank, -1) + 1
            waiting[self._network.box(rank, self.rank, number, counts[rank])] = tensor
        return Sent(waiting, taken)

    def post(self, key, words):
        assert key not in self._network.notes
        self._network.notes[key] = list(words)

    def posted(self, keys):
        notes = self._network.notes
        return [notes[key] for key in keys] if all(key in notes for key in keys) else None

    def forget(self, key):
        del self._network.notes[key]


def vector(client, name="", when=0):
    generator = torch.Generator().manual_seed(1000 * when + 10 * client + len(name))
    return torch.randn(FEATURES + 1, generator=generator)


def rounds(owners, size, shared=True, names=("other", "control"), damage=0.0, number=2):
    """Every rank sends the rows of its clients; returns per rank its rows, exchange, and bytes sent."""
    network = Network(size, damage)

    def work(rank):
        torch.manual_seed(0)
        binding = BoundParameters(nn.Linear(FEATURES, 1), "module")
        total = binding.theta.numel()
        columns = Columns(Columns.cut(total, size), rank) if shared else Columns.whole(total)
        rows, ranks = ColumnRows(binding, len(owners), columns), Ranks(network, rank)
        spans = columns.spans if shared else [(0, total)] * size
        exchange = RowExchange(ranks, rows, spans)
        order = random.Random(rank)
        most = 0
        for when in range(number):
            rows.begin_round()
            with pytest.raises(ValueError, match="row 0 must hold"):
                rows.norms([0])
            exchange.begin()
            mine, sent = [client for client, owner in enumerate(owners) if owner == rank], []
            order.shuffle(mine)
            for client in mine:
                rows.row(client).copy_(vector(client, when=when))
                rows.received(client)
                sent.append(exchange.send(client, {name: vector(client, name, when) for name in names}))
                most = max(most, len(rows._whole))
                time.sleep(order.random() / 200)
            everyones = ranks.gather(sent)
            exchange.complete(everyones)
        return rows, ranks.bytes, most

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(work, range(size)))
    assert not network.notes, "another fit of the process would find them"
    return found


CLIENTS = {"even": (0, 1, 2, 0, 1, 2), "uneven": (0, 0, 0, 0, 1, 0), "one rank": (2, 2, 2, 2)}


@pytest.mark.parametrize("shared", [True, False], ids=["columns", "whole rows"])
@pytest.mark.parametrize("owners", CLIENTS.values(), ids=CLIENTS)
def test_rows_get_where_their_columns_belong(owners, shared):
    names = ("control", "other")
    for rows, *_ in rounds(owners, 3, shared):
        for client in range(len(owners)):
            expected = vector(client, when=1)
            assert torch.equal(rows.values[client], rows.columns.part(expected))
            for name in names:
                assert torch.equal(rows.companion(name)[client], rows.columns.part(vector(client, name, 1)))
            norms = {name: float(vector(client, name, 1).double().norm()) for name in names}
            assert rows.companion_norms([client]) == [pytest.approx(norms, rel=1e-7)]
            assert rows.same_companions({client: 4}) == names
        backwards = range(len(owners))[::-1]
        norms = [float(vector(client, when=1).double().norm()) for client in backwards]
        assert rows.norms(backwards).tolist() == pytest.approx(norms, rel=1e-7)


@pytest.mark.parametrize("owners", CLIENTS.values(), ids=CLIENTS)
def test_one_rank_may_hold_all_columns_of_a_small_model(owners, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "FEATURES", 5)
    found = rounds(owners, 3)
    assert [rows.columns.numel for rows, *_ in found] == [0, 0, 6]
    for rows, *_ in found:
        for client in range(len(owners)):
            assert torch.equal(rows.values[client], rows.columns.part(vector(client, when=1)))


def test_every_number_is_sent_once_to_each_rank_that_needs_it():
    owners = CLIENTS["uneven"]
    for rank, (rows, sent, _) in enumerate(rounds(owners, 3, names=(), number=1)):
        assert sent == owners.count(rank) * 4 * (rows.columns.total - rows.columns.numel)


def test_rows_that_have_travelled_make_room():
    for rows, _, most in rounds((0, 1) * 12, 2, names=(), number=1):
        assert most < 12
        assert len(rows._free) <= most + 1
        assert all(torch.equal(rows.values[k], rows.columns.part(vector(k))) for k in range(24))


@pytest.mark.parametrize("shared", [True, False], ids=["columns", "whole rows"])
def test_what_does_not_arrive_whole_is_noticed(shared):
    with pytest.raises(RankError, match=r"row \d of the round must be what its client has sent"):
        rounds((1, 0), 2, shared, names=("control",), damage=1e-3, number=1)
