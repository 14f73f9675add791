# SPDX-License-Identifier: Apache-2.0
"""What a client rule keeps in columns reaches the ranks where its clients train, whole and nowhere else."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from column_shards import Meeting
from test_column_rows import Network, Ranks

from fl_lightning.algorithms import ClientRule
from fl_lightning.algorithms.records import Federation
from fl_lightning.clients.ranks.column_rows import ColumnState
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage.declared import server_state
from fl_lightning.core.storage.per_client import per_client
from fl_lightning.core.updates import Columns

LAYOUT = ParamLayout.from_sizes((20_000, 13, 3))
OWNERS = {4: 1, 0: 0, 2: 1, 7: 0}


def whole(client):
    return torch.arange(LAYOUT.numel, dtype=torch.float64) + 1e6 * client


class Kept(ClientRule):
    """State of each kind: in columns or not, for everyone or for one client."""

    mean = server_state(torch.Tensor, sent="all")
    count = server_state(0, sent="all")
    small = server_state(torch.zeros(0), sent="all")
    hidden = server_state(0)
    own = per_client(torch.Tensor, sent="owner")
    visits = per_client(int, sent="owner")

    def __init__(self):
        self.begun = None

    def begin_fit(self, federation):
        self.begun = (self.mean is not None, sorted(self.own))


def filled(columns):
    rule = Kept()

    def part(client):  # every other number of memory, as in a row of a wider matrix
        return torch.stack([columns.part(whole(client))] * 2, 1)[:, 0]

    rule.mean, rule.count, rule.small, rule.hidden = part(9), 3, torch.ones(2), 5
    for client in range(8):
        rule.own[client], rule.visits[client] = part(client), client + 1
    return rule


@pytest.mark.parametrize("ranks", [2, 5])  # of three slices, so that some of five hold nothing
def test_clients_get_what_the_server_keeps_for_them(ranks):
    network, meeting = Network(ranks), Meeting(ranks)
    borders = Columns.cut(LAYOUT.numel, ranks)
    federation = Federation(8, LAYOUT, torch.device("cpu"), torch.float64, 4, 1)

    def work(rank):
        columns = Columns(borders, rank, lambda mine, sizes: meeting.gather(rank, mine, sizes))
        visiting = filled(columns)  # of another round
        state = ColumnState(filled(columns), visiting, columns, Ranks(network, rank), federation)
        for owners in ({1: 0, 3: 1}, OWNERS):
            state.hand_out(owners)
        return visiting

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(work, range(ranks)))
    for rank, rule in enumerate(found):
        mine = sorted(client for client, owner in OWNERS.items() if owner == rank)
        assert sorted(rule.own) == sorted(rule.visits) == mine
        assert rule.begun == (True, mine), "a visit begins with its state"
        assert torch.equal(rule.mean, whole(9))
        assert (rule.count, rule.hidden) == (3, 0)
        assert torch.equal(rule.small, torch.ones(2))
        for client in mine:
            assert torch.equal(rule.own[client], whole(client))
            assert rule.visits[client] == client + 1


def test_what_is_no_row_is_refused():
    columns = Columns(Columns.cut(LAYOUT.numel, 2), 0)
    server = filled(columns)
    server.own[0] = torch.ones(7)
    state = ColumnState(
        server, Kept(), columns, Ranks(Network(2), 0), Federation(8, LAYOUT, torch.device("cpu"), torch.float64)
    )
    server.mean = None
    with pytest.raises(
        ValueError, match=r"^Kept must hold a number per parameter, \d+ on this process, found shape \[7\]"
    ):
        state.hand_out({0: 0})
