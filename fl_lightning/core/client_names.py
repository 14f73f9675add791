# SPDX-License-Identifier: Apache-2.0
"""What people call the clients. Numbers stay the keys of everything that is kept."""

from __future__ import annotations

from collections.abc import Sequence


class _Numbers(Sequence[str]):
    """``"0"``, ``"1"`` and so on: nothing is stored for clients without names."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, client_id: int) -> str:  # type: ignore[override]
        return str(range(self._count)[client_id])


def numbered(count: int) -> Sequence[str]:
    """The names of clients that have numbers only."""
    return _Numbers(count)


def client_label(client_id: int, names: Sequence[str]) -> str:
    """How a message speaks of a client: its number, and its name if that is another one."""
    return named(client_id, names[client_id])


def named(client_id: int, name: str) -> str:
    """A client's number, and its name if that is another one."""
    return str(client_id) if name == str(client_id) else f"{client_id} ({name!r})"
