# SPDX-License-Identifier: Apache-2.0
"""One model per client in files, for models that are too large or too many for memory and checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fl_lightning.core.model_snapshot import Snapshot
from fl_lightning.core.storage.files import client_file, read_whole, write_whole
from fl_lightning.core.storage.per_client import ByClient

_CHECKPOINTS = 2
"""So many of the newest can be resumed from."""


class ClientFiles(ByClient[Snapshot]):
    """One :class:`~fl_lightning.core.model_snapshot.Snapshot` per client: ``<directory>/client-<id>/round-<when>.pt``.

    A checkpoint holds ids, rounds and digests only; the files are what it refers to. A file is never changed, and stays
    as long as it is a client's newest or one of the last two different states refers to it. Every fit needs a directory
    of its own.
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
        model = value.to("cpu")
        content = {"client": client_id, "round": when, "params": model.params, "buffers": model.buffers}
        write_whole(self._path(client_id, when), content, private=True)
        before = self._newest.get(client_id)
        self._newest[client_id] = when, _digest(model)
        if before is not None:
            self._remove({(client_id, before[0])})

    def tentatively(self) -> Callable[[bool], None]:
        """Nothing: reports bring models once their round has happened."""
        return lambda happened: None

    def clear(self) -> None:
        """Forgets everything; files stay where they are."""
        self._newest: dict[int, tuple[int, int]] = {}
        self._referred: list[dict[int, int]] = []  # client to round, per state handed out

    def state_dict(self) -> dict[str, Any]:
        """Which files are the newest, ``[k, 3]``: client, round, digest. Their removal waits for later states."""
        state = {client: when for client, (when, _) in self._newest.items()}
        if state and (not self._referred or self._referred[-1] != state):
            self._referred.append(state)
            dropped, self._referred = self._referred[:-_CHECKPOINTS], self._referred[-_CHECKPOINTS:]
            self._remove({entry for old in dropped for entry in old.items()})
        entries = [[client, when, digest] for client, (when, digest) in sorted(self._newest.items())]
        return {"files": torch.tensor(entries, dtype=torch.int64).view(-1, 3)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`; files must be there, and are read when they are asked for."""
        self.clear()
        self._newest = {client: (when, digest) for client, when, digest in state["files"].tolist()}
        for client, (when, _) in self._newest.items():
            if not self._path(client, when).exists():
                raise FileNotFoundError(
                    f"{self._path(client, when)} is gone, the model of client {client} after round {when} that the "
                    "checkpoint refers to: resume from one of the two newest checkpoints"
                )
        self._referred = [{client: when for client, (when, _) in self._newest.items()}] if self._newest else []

    def _path(self, client_id: int, when: int) -> Path:
        return client_file(self.directory, client_id, when)

    def _remove(self, entries: AbstractSet[tuple[int, int]]) -> None:
        """Deletes files that nothing refers to any more."""
        kept = {entry for state in self._referred for entry in state.items()}
        kept |= {(client, when) for client, (when, _) in self._newest.items()}
        for client, when in entries - kept:
            self._path(client, when).unlink(missing_ok=True)


def _digest(model: Snapshot) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in (model.params, model.buffers):
        digest.update(part.detach().contiguous().view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little", signed=True)
