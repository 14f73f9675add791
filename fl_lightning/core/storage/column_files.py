# SPDX-License-Identifier: Apache-2.0
"""What several processes hold in columns, in files beside a checkpoint that any number of processes can read.

Beside ``name.ckpt`` lies the folder ``name.ckpt.columns-<token>`` with one file per share of the columns. The
checkpoint itself holds everything else, the weights among it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.columns import Columns
from fl_lightning.core.storage.files import copy_whole, read_whole, write_whole

_REFERENCE = "lies in columns"
SECTION = "columns"
"""Names what says where the files lie, in the federated state of a checkpoint."""


@dataclass(frozen=True)
class ColumnPart:
    """A tensor ``[..., numel]`` of which this process holds some columns."""

    values: Tensor
    columns: Columns

    def whole(self) -> Tensor:
        """``[..., n]`` on the CPU; all processes call it at the same places."""
        rows = self.values.reshape(-1, self.values.shape[-1])
        joined = [self.columns.joined(row).cpu() for row in rows]
        shape = (*self.values.shape[:-1], self.columns.total)
        return torch.stack(joined).view(shape) if joined else torch.empty(0, self.columns.total, dtype=rows.dtype)


class StoredColumns:
    """The files of a checkpoint, read as far as they are needed.

    Args:
        checkpoint: the checkpoint's own file.
        section: what it says about them.

    Attributes:
        files: one per share of the columns that is not empty.

    Raises:
        ValueError: a file is missing.
    """

    def __init__(self, checkpoint: Path, section: Mapping[str, Any]) -> None:
        self._folder, self._borders = _folder(checkpoint, section["token"]), list(section["borders"])
        self._read: dict[Path, list[Tensor]] = {}
        self.files = self.listed(checkpoint, section)
        missing = [str(path) for path in self.files if not path.exists()]
        if missing:
            raise ValueError(
                f"{checkpoint} needs what several processes have saved beside it, found no {missing[0]}: keep the "
                f"folder {self._folder.name} beside the checkpoint, under its name"
            )

    @staticmethod
    def listed(checkpoint: Path, section: Mapping[str, Any]) -> list[Path]:
        """The files, one per share of the columns that is not empty."""
        folder = _folder(checkpoint, section["token"])
        return [folder / f"{begin}.pt" for begin, end in pairwise(section["borders"]) if end > begin]

    def part(self, number: int, begin: int, end: int) -> Tensor:
        """The columns from ``begin`` up to ``end`` of the tensor with this number."""
        found = []
        for first, last in pairwise(self._borders):
            holds = max(first, begin) < min(last, end)
            if holds or first <= begin == end <= last != first:  # a share without columns has their dtype, too
                whole = self._tensors(self._folder / f"{first}.pt")[number]
                found.append(whole[..., max(begin, first) - first : min(end, last) - first])
        return torch.cat(found, -1)

    def _tensors(self, path: Path) -> list[Tensor]:
        if path not in self._read:
            self._read[path] = read_whole(path, partial(_load, path), "use another checkpoint")
        return self._read[path]

    def check(self) -> None:
        """Reads all files.

        Raises:
            ValueError: one is damaged.
        """
        for path in self.files:
            read_whole(path, partial(_load, path), "use another checkpoint")


@dataclass(frozen=True)
class StoredPart:
    """A tensor ``[..., n]`` in such files."""

    stored: StoredColumns
    number: int


def in_columns(state: Mapping[str, Any], names: Sequence[str] | None, columns: Columns) -> dict[str, Any]:
    """A rule's state for a checkpoint: what lies in columns is marked, if several processes share them.

    Args:
        state: of this process.
        names: the rule's ``column_state``.
        columns: of this process.
    """
    if len(columns.spans) == 1:
        return dict(state)
    return _changed(state, names or (), lambda value: ColumnPart(value, columns))


def for_columns(state: Mapping[str, Any], names: Sequence[str] | None, columns: Columns) -> dict[str, Any]:
    """A rule's state from a checkpoint, or from an earlier fit, for a process with these columns."""

    def mine(value: Any) -> Tensor:
        if isinstance(value, ColumnPart):
            return value.values
        if isinstance(value, StoredPart):
            return value.stored.part(value.number, *columns.span)
        return columns.part(value) if value.shape[-1] == columns.total else value

    return _changed(state, names or (), mine)


def _changed(state: Mapping[str, Any], names: Sequence[str], change: Callable[[Any], Any]) -> dict[str, Any]:
    result = dict(state)
    for name in names:
        head, _, rest = name.partition(".")
        if head in result:
            result[head] = _changed(result[head], (rest,), change) if rest else _every(result[head], change)
    return result


def _every(value: Any, change: Callable[[Any], Any], kinds: tuple[type, ...] = ()) -> Any:
    """The same dicts and lists with their tensors, or only what is of some kinds, changed."""
    if isinstance(value, Mapping):
        return {name: _every(entry, change, kinds) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_every(entry, change, kinds) for entry in value)
    return change(value) if isinstance(value, kinds or (Tensor, ColumnPart, StoredPart)) else value


# ---- checkpoints


def taken_out(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[ColumnPart]]:
    """The state with numbers in place of what lies in columns, and that, in this order."""
    parts: list[ColumnPart] = []

    def number(part: ColumnPart) -> dict[str, int]:
        parts.append(part)
        return {_REFERENCE: len(parts) - 1}

    return _every(state, number, (ColumnPart,)), parts


def joined(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with whole tensors in place of what lies in columns; all processes call it at the same places."""
    whole: dict[str, Any] = _every(state, lambda part: part.whole(), (ColumnPart,))
    return whole


def with_stored(state: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """A state that was read from a file, with handles of its columns.

    Raises:
        ValueError: files are missing.
    """
    if SECTION not in state:
        return dict(state)
    stored = StoredColumns(checkpoint, state[SECTION])

    def found(value: Any) -> Any:
        if isinstance(value, Mapping):
            if set(value) == {_REFERENCE}:
                return StoredPart(stored, value[_REFERENCE])
            return {name: found(entry) for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(found(entry) for entry in value)
        return value

    return {name: found(value) for name, value in state.items() if name != SECTION}


def write_part(checkpoint: Path, token: str, parts: Sequence[ColumnPart]) -> dict[str, Any]:
    """Writes the columns of this process; returns what the checkpoint says about the files of all.

    Raises:
        OSError: the file could not be written.
    """
    columns = parts[0].columns
    begin, end = columns.span
    if end > begin:
        # Copies, because a row of a larger matrix would be saved with all of it.
        values = [part.values.detach().cpu().clone(memory_format=torch.contiguous_format) for part in parts]
        write_whole(_folder(checkpoint, token) / f"{begin}.pt", values)
    return {"token": token, "borders": list(columns.borders)}


def drop_columns(checkpoint: Path, keep: Collection[str] = ()) -> None:
    """Deletes the files beside a checkpoint, but for those with some tokens."""
    for folder in checkpoint.parent.glob(f"{_escaped(checkpoint.name)}.columns-*"):
        if folder.name.rpartition(".columns-")[2] not in keep:
            shutil.rmtree(folder, ignore_errors=True)


def copy_columns(checkpoint: Path, other: Path) -> list[str]:
    """Copies the files beside a checkpoint for a copy of it; returns their tokens."""
    tokens = []
    for folder in checkpoint.parent.glob(f"{_escaped(checkpoint.name)}.columns-*"):
        token = folder.name.rpartition(".columns-")[2]
        for path in folder.glob("*.pt"):
            copy_whole(path, _folder(other, token) / path.name)
        tokens.append(token)
    return tokens


def _folder(checkpoint: Path, token: str) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.columns-{token}")


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
