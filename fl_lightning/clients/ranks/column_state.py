# SPDX-License-Identifier: Apache-2.0
"""What the server's half of a client rule keeps in columns, brought to the ranks where its clients train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.records import Federation
from fl_lightning.core.storage import kept
from fl_lightning.core.updates import Columns
from fl_lightning.lightning.ranks import Ranks


@dataclass(frozen=True)
class ColumnState:
    """Hands out state as the server of a real federation does, from columns that several ranks hold."""

    server: ClientRule  # its state lies in columns; the server commits rounds with it
    visiting: ClientRule  # a copy, with which clients train here
    columns: Columns  # of this rank
    ranks: Ranks
    federation: Federation  # what the copy is told at the beginning of each round

    def hand_out(self, owners: Mapping[int, int]) -> None:
        """Training begins: the copy gets what the clients that train here need."""
        visiting, federation = self.visiting, self.federation
        to_all = kept.state(self.server, "all")
        kept.take(visiting, {name: self._joined(name, value) for name, value in to_all.items()})
        sends, receives, mine = list[tuple[Tensor, int]](), list[tuple[Tensor, int]](), dict[int, dict[str, object]]()
        for client, owner in owners.items():
            state = kept.for_one(self.server, client)
            parts = {name: self._placed(value) for name, value in state.items() if self._in_columns(name)}
            if owner == self.ranks.rank:
                whole = {name: part.new_empty(self.columns.total) for name, part in parts.items()}
                mine[client] = {**state, **whole}
                for name, vector in whole.items():
                    self.columns.part(vector).copy_(parts[name])
                    receives += [(vector[a:b], rank) for rank, (a, b) in self._others() if b > a]
            elif self.columns.numel:
                sends += [(part, owner) for part in parts.values()]
        self.ranks.transfer(sends, receives).wait()
        for client, values in mine.items():
            kept.take_own(visiting, client, values)
        visiting.begin_fit(federation)

    def _in_columns(self, name: str) -> bool:
        return name in kept.columns(self.server)

    def _placed(self, part: Tensor) -> Tensor:
        return part.to(self.federation.device).contiguous()

    def _others(self) -> list[tuple[int, tuple[int, int]]]:
        return [(rank, span) for rank, span in enumerate(self.columns.spans) if rank != self.ranks.rank]

    def _joined(self, name: str, value: object) -> object:
        if isinstance(value, Tensor) and self._in_columns(name):
            return self.columns.joined(self._placed(value))
        return value
