# SPDX-License-Identifier: Apache-2.0
"""What one client keeps of its visits, until it hears which of them counted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from fl_lightning.core.storage.files import client_file, read_whole, write_whole


class KeptStates:
    """One state per visit of a client: in files ``<folder>/client-<id>/round-<when>.pt``, or in memory.

    A client hears with the next order which of its visits was the last that counted. The state of that visit is then
    its own, and the states of all others are deleted. At most two states are held at a time: of the last visit that
    counted, and of the last visit.
    """

    def __init__(self, client_id: int, folder: str | Path | None = None) -> None:
        self._client_id, self._folder = client_id, None if folder is None else Path(folder)
        self._held: dict[int, dict[str, Any]] = {}

    def settle(self, counted: int | None) -> dict[str, Any] | None:
        """The state after the visit in round ``counted``, the last that counted, if any; all others are deleted."""
        if self._folder is not None:
            for unfinished in self._path(0).parent.glob("*.part"):  # of a process that was killed
                unfinished.unlink(missing_ok=True)
        for when in self._rounds():
            if when != counted:
                self._delete(when)
        if counted is None:
            return None
        if counted not in self._rounds():
            place = "the memory of another process" if self._folder is None else str(self._path(counted))
            raise FileNotFoundError(
                f"{place} is gone, what client {self._client_id} kept of round {counted}, the last that "
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

    def put(self, when: int, state: dict[str, Any]) -> None:
        """Takes the state after the visit in round ``when``, complete."""
        if self._folder is None:
            self._held[when] = state
        else:
            write_whole(self._path(when), state, private=True)

    def _rounds(self) -> list[int]:
        if self._folder is None:
            return list(self._held)
        return [int(path.stem.partition("-")[2]) for path in self._path(0).parent.glob("round-*.pt")]

    def _delete(self, when: int) -> None:
        if self._folder is None:
            del self._held[when]
        else:
            self._path(when).unlink(missing_ok=True)

    def _path(self, when: int) -> Path:
        assert self._folder is not None
        return client_file(self._folder, self._client_id, when)
