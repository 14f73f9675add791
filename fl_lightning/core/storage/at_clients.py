# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102 - Declared documents what declarations override
"""What lies at clients: models of a simulation's clients in memory or in files, and what a client elsewhere keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fl_lightning.arguments import checked
from fl_lightning.core.model_snapshot import Snapshot
from fl_lightning.core.storage.declared import Container, Extent, named
from fl_lightning.core.storage.files import read_whole, write_whole
from fl_lightning.core.storage.per_client import PerClient
from fl_lightning.core.tensors import checksum

Models: TypeAlias = "PerClient[Snapshot] | ClientFiles"
"""One model per client, wherever they lie."""


class at_clients(Container[Models]):  # noqa: N801 - as property
    """Declares a model, or a part of one, that stays at its client: a :class:`Snapshot` by client id.

    A client's report brings it, as ``ClientReport(local_state={name: plain(snapshot)})``, and it takes the place of
    what the client had if the report enters the step. The server of a real federation never sees it.

    Args:
        files: the rule's attribute that says in which directory models lie; without a directory, in memory.
        size: that says how many bytes one takes, for the memory plan; ``None``: as many as the module's.
    """

    at_client, kind = True, Snapshot

    @checked()
    def __init__(self, *, files: str | None = None, size: str | None = None) -> None:
        self.files, self._size, self.placement = files, size, () if files is None else (files,)

    def initial(self, rule: object) -> Models:
        directory = named(rule, self.files)
        return PerClient(Snapshot) if directory is None else ClientFiles(directory)

    def loaded(self, rule: object, state: Any) -> Models:
        here = named(rule, self.files) is not None
        if ("files" in state) != here:
            there = f"itself: leave {self.files} out" if here else "in files: give the method the same directory"
            raise ValueError(f"the checkpoint has the personal models {there}")
        return super().loaded(rule, state)

    def max_nbytes(self, rule: object, extent: Extent) -> int:
        held = extent.clients if named(rule, self.files) is None else 0
        return (held + extent.cohort) * (named(rule, self._size) or extent.model)


_CHECKPOINTS = 2
"""So many of the newest can be resumed from."""


class ClientFiles(Mapping[int, Snapshot]):
    """One :class:`~fl_lightning.core.model_snapshot.Snapshot` per client: ``<directory>/client-<id>/round-<when>.pt``.

    The id in the name is the client's first one: it stays where others join or leave. A checkpoint holds ids, rounds
    and digests only; the files are what it refers to. A file is never changed, and stays as long as it is a client's
    newest or one of the last two different states refers to it. Every fit needs a directory of its own.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.clear()

    def __len__(self) -> int:
        return len(self._newest)

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._newest

    def __iter__(self) -> Iterator[int]:
        return iter(self._newest)

    def __getitem__(self, client_id: int) -> Snapshot:
        when, digest = self._newest[client_id]
        path = self._path(client_id, when)
        load = partial(torch.load, path, map_location="cpu", weights_only=True)
        content = read_whole(path, load, f"bring back the file, or resume from a checkpoint of before round {when}")
        model = Snapshot(content["params"], content["buffers"])
        if _digest(model) != digest:
            raise ValueError(
                f"{path} is not the model of client {client_id} that the checkpoint refers to: another fit has "
                "written to this directory; give every fit one of its own"
            )
        return model

    def keep(self, client_id: int, value: Snapshot, when: int) -> None:
        """Writes the client's model of round ``when``, flushed to disk before it gets its name."""
        if client_id not in self._newest and client_id in self._places.values():
            self._places[client_id] = max(*self._places.values(), *self._newest) + 1
        model = value.to("cpu")
        content = {"client": client_id, "round": when, "params": model.params, "buffers": model.buffers}
        write_whole(self._path(client_id, when), content, private=True)
        before = self._newest.get(client_id)
        self._newest[client_id] = when, _digest(model)
        if before is not None:
            self._remove({(client_id, before[0])})

    def transaction(self) -> Callable[[bool], None]:
        """Nothing: reports bring models once their round has happened."""
        return lambda happened: None

    def clear(self) -> None:
        """Forgets everything; files stay where they are."""
        self._newest: dict[int, tuple[int, int]] = {}
        self._places: dict[int, int] = {}  # by client, the id in the names of its files, if it is another one
        self._referred: list[dict[int, int]] = []  # client to round, per state handed out

    def state_dict(self) -> dict[str, Any]:
        """Which files are the newest, ``[k, 4]``: client, round, digest, first id. Removal waits for later states."""
        state = {client: when for client, (when, _) in self._newest.items()}
        if state and (not self._referred or self._referred[-1] != state):
            self._referred.append(state)
            dropped, self._referred = self._referred[:-_CHECKPOINTS], self._referred[-_CHECKPOINTS:]
            self._remove({entry for old in dropped for entry in old.items()})
        entries = [[c, *of_round, self._places.get(c, c)] for c, of_round in sorted(self._newest.items())]
        return {"files": torch.tensor(entries, dtype=torch.int64).view(-1, 4)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`; files must be there, and are read when they are asked for."""
        self.clear()
        for client, when, digest, place in state["files"].tolist():
            self._newest[client], self._places[client] = (when, digest), place
        for client, (when, _) in self._newest.items():
            if not self._path(client, when).exists():
                raise FileNotFoundError(
                    f"{self._path(client, when)} is gone, the model of client {client} after round {when} that the "
                    "checkpoint refers to: resume from one of the two newest checkpoints"
                )
        self._referred = [{client: when for client, (when, _) in self._newest.items()}] if self._newest else []

    def _path(self, client_id: int, when: int) -> Path:
        return _file(self.directory, self._places.get(client_id, client_id), when)

    def _remove(self, entries: AbstractSet[tuple[int, int]]) -> None:
        """Deletes files that nothing refers to any more."""
        referred = {entry for state in self._referred for entry in state.items()}
        referred |= {(client, when) for client, (when, _) in self._newest.items()}
        for client, when in entries - referred:
            self._path(client, when).unlink(missing_ok=True)


def _digest(model: Snapshot) -> int:
    return (checksum(model.params) + 31 * checksum(model.buffers)) % 2**63


def _file(directory: Path, client_id: int, when: int) -> Path:
    """Where what a client has of a round lies: ``<directory>/client-<id>/round-<when>.pt``."""
    return directory / f"client-{client_id:06d}" / f"round-{when:06d}.pt"


class ClientStateStore:
    """One state per visit of a client, in files ``<folder>/client-<id>/round-<when>.pt``, or in memory.

    A client hears with the next order which of its visits was the last that counted. The state of that visit is then
    its own, and the states of all others are deleted. At most two states are held at a time: of the last visit that
    counted, and of the last visit.
    """

    def __init__(self, client_id: int, folder: str | Path | None = None) -> None:
        self._client_id, self._folder = client_id, None if folder is None else Path(folder)
        self._held: dict[int, dict[str, Any]] = {}

    def restore(self, counted: int | None) -> dict[str, Any] | None:
        """The state after the visit in round ``counted``, the last that counted, if any; all others are deleted."""
        if self._folder is not None:
            for unfinished in self._path(0).parent.glob("*.part"):  # of a process that was killed
                unfinished.unlink(missing_ok=True)
        for when in self._rounds():
            if when != counted and self._folder is None:
                del self._held[when]
            elif when != counted:
                self._path(when).unlink(missing_ok=True)
        if counted is None:
            return None
        if counted not in self._rounds():
            place = "the memory of another process" if self._folder is None else str(self._path(counted))
            raise FileNotFoundError(
                f"{place} is gone, the state of client {self._client_id} after round {counted}, the last that "
                "counted for it: give it its folder back, or send counted=None to let it begin anew"
            )
        if self._folder is None:
            return self._held[counted]
        path = self._path(counted)
        state: dict[str, Any] = read_whole(
            path,
            partial(torch.load, path, weights_only=True),
            f"bring back the file, or send counted=None to let client {self._client_id} begin anew",
        )
        return state

    def save(self, when: int, state: dict[str, Any]) -> None:
        """Takes the state after the visit in round ``when``, complete."""
        if self._folder is None:
            self._held[when] = state
        else:
            write_whole(self._path(when), state, private=True)

    def _rounds(self) -> list[int]:
        if self._folder is None:
            return list(self._held)
        return [int(path.stem.partition("-")[2]) for path in self._path(0).parent.glob("round-*.pt")]

    def _path(self, when: int) -> Path:
        assert self._folder is not None
        return _file(self._folder, self._client_id, when)
