# SPDX-License-Identifier: Apache-2.0
"""What several processes hold in columns, on its way into a checkpoint and out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.columns import Columns


@dataclass(frozen=True)
class ColumnPart:
    """A tensor ``[..., numel]`` of which this process holds some columns."""

    values: Tensor
    columns: Columns

    def whole(self) -> Tensor:
        """``[..., n]`` on the CPU of the first process, nothing elsewhere; all call it at the same places."""
        first, *outer = self.columns.share == 0, *self.values.shape[:-1]
        rows = self.values.reshape(prod(outer), self.values.shape[-1])
        joined = [row.cpu() if first else row[:0] for row in map(self.columns.joined, rows)]
        shape = (*outer, self.columns.total)
        empty = torch.empty(0, self.columns.total, dtype=rows.dtype)
        return torch.stack(joined).view(shape) if first and joined else empty


def in_columns(state: Mapping[str, Any], names: Sequence[str] | None, columns: Columns) -> dict[str, Any]:
    """A rule's state for a checkpoint: what lies in columns is marked, if several processes share them."""
    if len(columns.spans) == 1:
        return dict(state)
    return _changed(state, names or (), lambda value: ColumnPart(value, columns))


def for_columns(state: Mapping[str, Any], names: Sequence[str] | None, columns: Columns) -> dict[str, Any]:
    """A rule's state from a checkpoint, or from an earlier fit, for a process with these columns."""

    def mine(value: Any) -> Tensor:
        if isinstance(value, ColumnPart):
            return value.values
        return columns.part(value) if value.shape[-1] == columns.total else value

    return _changed(state, names or (), mine)


def _changed(state: Mapping[str, Any], names: Sequence[str], change: Callable[[Any], Any]) -> dict[str, Any]:
    result = dict(state)
    for name in names:
        head, _, rest = name.partition(".")
        if head in result:
            result[head] = _changed(result[head], (rest,), change) if rest else _every(result[head], change)
    return result


def _every(value: Any, change: Callable[[Any], Any], kinds: tuple[type, ...] = (Tensor, ColumnPart)) -> Any:
    """The same dicts and lists with what is of some kinds changed."""
    if isinstance(value, Mapping):
        return {name: _every(entry, change, kinds) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_every(entry, change, kinds) for entry in value)
    return change(value) if isinstance(value, kinds) else value


def holds_parts(state: Any) -> bool:
    """Whether something in a state lies in columns."""
    found: list[ColumnPart] = []
    _every(state, found.append, (ColumnPart,))
    return bool(found)


def joined(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with whole tensors in place of what lies in columns; all processes call it at the same places."""
    whole: dict[str, Any] = _every(state, ColumnPart.whole, (ColumnPart,))
    return whole
