# SPDX-License-Identifier: Apache-2.0
"""What a client rule keeps in columns reaches the ranks where its clients train, whole and nowhere else."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from column_shares import Meeting
from test_column_rows import Network, Ranks

from fl_lightning.algorithms import ClientRule
from fl_lightning.algorithms.records import Federation
from fl_lightning.clients.ranks.column_state import ColumnState
from fl_lightning.core.columns import Columns
from fl_lightning.core.layout import ParamLayout

LAYOUT = ParamLayout.from_sizes((20_000, 13, 3))
OWNERS = {4: 1, 0: 0, 2: 1, 7: 0}


def whole(client):
    return torch.arange(LAYOUT.numel, dtype=torch.float64) + 1e6 * client


class Kept(ClientRule):
    """State of each kind: in columns or not, for everyone or for one client."""

    column_state = ("mean", "own")

    def __init__(self, columns):
        self.columns, self.heard = columns, {}

    def _part(self, client):  # every other number of memory, as in a row of a wider matrix
        return torch.stack([self.columns.part(whole(client))] * 2, 1)[:, 0]

    def broadcast(self):
        return {"mean": self._part(9), "count": 3, "small": torch.ones(2)}

    def state_for(self, client_id):
        return {"own": self._part(client_id), "visits": client_id + 1}

    def take_broadcast(self, values):
        self.heard["all"] = values

    def take_state(self, client_id, values):
        self.heard[client_id] = values

    def begin_fit(self, federation):
        self.heard["begun"] = sorted(map(str, self.heard))

    def reset(self):
        self.heard = {}


@pytest.mark.parametrize("ranks", [2, 5])  # of three slices, so that some of five hold nothing
def test_clients_get_what_the_server_keeps_for_them(ranks):
    network, meeting = Network(ranks), Meeting(ranks)
    borders = Columns.cut(LAYOUT.numel, ranks)
    federation = Federation(8, LAYOUT, torch.device("cpu"), torch.float64, 4, 1)

    def work(rank):
        columns = Columns(borders, rank, lambda mine, sizes: meeting.gather(rank, mine, sizes))
        visiting = Kept(columns)
        state = ColumnState(Kept(columns), visiting, columns, Ranks(network, rank), federation)
        for owners in ({1: 0, 3: 1}, OWNERS):
            state.hand_out(owners)
        return visiting.heard

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(work, range(ranks)))
    for rank, heard in enumerate(found):
        mine = [client for client, owner in OWNERS.items() if owner == rank]
        assert heard.keys() == {"all", "begun", *mine}
        assert heard["begun"] == sorted(["all", *map(str, mine)]), "a visit begins with its state"
        assert torch.equal(heard["all"]["mean"], whole(9))
        assert heard["all"]["count"] == 3
        assert torch.equal(heard["all"]["small"], torch.ones(2))
        for client in mine:
            assert torch.equal(heard[client]["own"], whole(client))
            assert heard[client]["visits"] == client + 1
