# SPDX-License-Identifier: Apache-2.0
"""Rows and states of client rules where several ranks share the columns, and how they get to where they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.records import Federation
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.update_rows import UpdateRows
from fl_lightning.core.errors import RankError
from fl_lightning.core.storage import rule_state
from fl_lightning.core.tensors import checksum, empty_rows
from fl_lightning.core.updates import Columns, UpdateMatrix
from fl_lightning.lightning.ranks import Pending, Ranks


@dataclass(frozen=True)
class SentRows:
    """What all ranks hear of the rows of one client."""

    index: int  # its row
    norm: float  # of the update
    companions: Mapping[str, float]  # norms of what it sends beside that, by name
    checksums: tuple[int, ...]  # of the update and of its companions, in the order of names


class ColumnRows(UpdateRows):
    """The columns that this rank holds of all clients' rows, and the whole rows of clients that trained here.

    Norms are computed where a client trains, so no rank needs the whole rows of others. If a rank holds all columns,
    whole rows lie in their places from the beginning.
    """

    def __init__(self, binding: BoundParameters, capacity: int, columns: Columns) -> None:
        super().__init__(binding, capacity, columns=columns)
        self._whole: dict[int, Tensor] = {}
        self._free: list[Tensor] = []
        self._known: dict[int, SentRows] = {}

    def begin_round(self) -> None:
        """See the base class; whole rows of the round before make room."""
        super().begin_round()
        self._free += self._whole.values()
        self._whole.clear()
        self._known.clear()

    def reached_by(self, step: Tensor) -> None:
        """See the base class; ranks that did not train the client have its update alone, and all must do the same."""

    def row(self, index: int) -> Tensor:
        """See the base class."""
        if self.columns.numel == self.columns.total:
            return self.values[index]
        if index not in self._whole:
            self._whole[index] = self._free.pop() if self._free else empty_rows(1, self._binding.theta)[0]
        return self._whole[index]

    def release(self, index: int) -> None:
        """The whole row of a client that trained here is where it belongs: its memory may be used again."""
        if index in self._whole:
            self._free.append(self._whole.pop(index))

    def sent(self, index: int, companions: Mapping[str, Tensor]) -> SentRows:
        """The norms of what a client that trained here sends."""
        update, names = self.update(index), sorted(companions)
        named = {name: self._whole_norm(companions[name]) for name in names}
        checksums = tuple(checksum(vector) for vector in (update, *(companions[name] for name in names)))
        return SentRows(index, self._whole_norm(update), named, checksums)

    def places(self, index: int, names: Iterable[str]) -> list[Tensor]:
        """Where the columns of a client's update lie, and those of what it sends beside that, in the order of names."""
        return [self.values[index], *(self.companion(name)[index] for name in sorted(names))]

    def _whole_norm(self, vector: Tensor) -> float:
        return float(UpdateMatrix(vector[None], self._binding.layout).norms())

    def arrived(self, sent: SentRows) -> None:
        """The columns of a client are in their places."""
        self.received(sent.index)
        self._known[sent.index] = sent
        self._sent[sent.index] = tuple(sent.companions)

    def norms(self, indices: Sequence[int]) -> Tensor:
        """See the base class; on the CPU."""
        for index in indices:
            self._check(index)
        return torch.tensor([self._known[index].norm for index in indices], dtype=torch.float64)

    def companion_norms(self, indices: Sequence[int]) -> list[dict[str, float]]:
        """See the base class."""
        return [dict(self._known[index].companions) for index in indices]


class RowExchange:
    """Sends the whole rows of clients that trained here to the ranks that hold their columns, and receives theirs.

    Rows travel in waves, one client of each rank in a wave. A wave begins when all ranks have a client for it, and
    travels while further clients train. Only those of the end, in which some ranks have none, are waited for.
    """

    def __init__(self, ranks: Ranks, rows: ColumnRows, spans: Sequence[tuple[int, int]]) -> None:
        self._ranks, self._rows, self._spans = ranks, rows, spans  # first column and end of what each rank holds
        self._number = -1
        self._own: list[tuple[int, Mapping[str, Tensor]]] = []
        self._begun, self._over, self._pending = 0, 0, list[Pending]()

    def begin(self) -> None:
        """Nobody has sent anything; what was begun before is complete."""
        self._number += 1
        self._own, self._pending = [], []
        self._begun, self._over = 0, 0

    def send(self, index: int, companions: Mapping[str, Tensor]) -> SentRows:
        """Row ``index`` of this rank is complete; returns what the others must hear of it with :meth:`complete`."""
        sent = self._rows.sent(index, companions)
        self._ranks.post(self._key(len(self._own), self._ranks.rank), [index, *companions])
        self._own.append((index, companions))
        self._advance()
        self._release()
        return sent

    def _key(self, wave: int, rank: int) -> str:
        return f"exchange {self._number} wave {wave} rank {rank}"

    def _advance(self) -> None:
        """Begins the waves for which all ranks have a client."""
        while self._begun < len(self._own):
            posted = self._ranks.posted([self._key(self._begun, rank) for rank in range(self._ranks.size)])
            if posted is None:
                return
            self._begin({rank: (index, names) for rank, (index, *names) in enumerate(posted)})

    def _release(self) -> None:
        """Gives up rows that have travelled."""
        while self._over < min(self._begun, len(self._own)) and self._pending[self._over].is_over():
            index, _ = self._own[self._over]
            self._own[self._over] = (index, {})
            self._rows.release(index)
            self._over += 1

    def complete(self, sent: Sequence[Sequence[SentRows]]) -> None:
        """Waits until the rows of all clients are in their places, with the bits that were sent."""
        while self._begun < max(map(len, sent), default=0):
            wave = self._begun
            self._begin({r: (s[wave].index, s[wave].companions) for r, s in enumerate(sent) if wave < len(s)})
        for pending in self._pending:
            pending.wait()
        self._release()
        for wave in range(len(self._own)):  # now, because another fit of this process counts from 0 again
            self._ranks.forget(self._key(wave, self._ranks.rank))
        everyone = [client for clients in sent for client in clients]
        self._check(everyone)
        for client in everyone:
            self._rows.arrived(client)

    def _check(self, everyone: Sequence[SentRows]) -> None:
        """The checksum of a row is the sum of those of its parts."""
        rows = self._rows
        mine = [[checksum(place) for place in rows.places(client.index, client.companions)] for client in everyone]
        found = [mine] if len(rows.columns.spans) == 1 else self._ranks.gather(mine)
        for client, *parts in zip(everyone, *found, strict=True):
            sums = [sum(each) for each in zip(*parts, strict=True)]
            if any((found - sent) % 2**64 for found, sent in zip(sums, client.checksums, strict=True)):
                raise RankError(
                    f"rank {self._ranks.rank} finds that row {client.index} of the round must be what its client has "
                    "sent, and that other bits have arrived: look for a fault in the connection of the processes"
                )

    def _begin(self, clients: Mapping[int, tuple[int, Sequence[str] | Mapping[str, float]]]) -> None:
        """Begins a wave: ``clients`` are row and companions' names of one client per rank, of those that have one."""
        sends, receives, rows, me = [], [], self._rows, self._ranks.rank
        begin, end = self._spans[me]
        for source, (index, names) in clients.items():
            places = rows.places(index, names)
            if source != me:
                receives += [(place, source) for place in places if end > begin]
                continue
            own, companions = self._own[self._begun]
            vectors = [rows.row(own), *(companions[name] for name in sorted(names))]
            for vector, place in zip(vectors, places, strict=True):
                if vector.data_ptr() != place.data_ptr():
                    place.copy_(vector[begin:end])
                others = [(rank, span) for rank, span in enumerate(self._spans) if rank != me]
                sends += [(vector[a:b], rank) for rank, (a, b) in others if b > a]
        self._pending.append(self._ranks.transfer(sends, receives, self._begun))
        self._begun += 1


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
        visiting, columns, rows = self.visiting, self.columns, rule_state.in_columns(self.server)
        to_all = rule_state.broadcast(self.server)
        whole = {name: columns.joined(self._placed(part)) for name, part in to_all.items() if name in rows}
        rule_state.load_broadcast(visiting, {**to_all, **whole})
        others = [(rank, span) for rank, span in enumerate(columns.spans) if rank != self.ranks.rank]
        sends, receives, mine = list[tuple[Tensor, int]](), list[tuple[Tensor, int]](), dict[int, dict[str, object]]()
        for client, owner in owners.items():
            state = rule_state.client_state(self.server, client)
            parts = {name: self._placed(value) for name, value in state.items() if name in rows}
            if owner == self.ranks.rank:
                whole = {name: part.new_empty(columns.total) for name, part in parts.items()}
                mine[client] = {**state, **whole}
                for name, vector in whole.items():
                    columns.part(vector).copy_(parts[name])
                    receives += [(vector[a:b], rank) for rank, (a, b) in others if b > a]
            elif columns.numel:
                sends += [(part, owner) for part in parts.values()]
        self.ranks.transfer(sends, receives).wait()
        for client, values in mine.items():
            rule_state.load_client_state(visiting, client, values)
        visiting.begin_fit(self.federation)

    def _placed(self, part: Tensor) -> Tensor:
        return rule_state.shard_of(self.server, self.columns, part).values.to(self.federation.device).contiguous()
