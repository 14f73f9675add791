# SPDX-License-Identifier: Apache-2.0
"""Memory banks: float buffers that a visit overwrites row by row under a pointer, as contrastive methods keep them.

The mean of two banks is no bank, and a pointer belongs to one of them. So a bank goes with its pointer: both come from
the client with most samples. What is overwritten tells a bank from an average that moves as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fl_lightning.core.modules import all_buffers_of
from fl_lightning.lightning.module.contents import equal_numbers

Vote = Literal["yes", "perhaps", "no"]
_VOTES: tuple[Vote, ...] = ("yes", "perhaps", "no")


class MemoryBanks:
    """Finds the banks of a module by what visits do to its buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._pointers: dict[str, dict[str, int]] = {}

    def remember(self) -> None:
        """A round begins: takes the pointers as they are."""
        self._owners: dict[str, Any] = {}
        for buffer in all_buffers_of(self._module):
            if buffer.value.is_floating_point() and buffer.value.dim() and not isinstance(buffer.owner, _NormBase):
                self._owners[buffer.name] = buffer.owner, buffer.key
        self._pointers = {name: _pointers_of(owner) for name, (owner, _) in self._owners.items()}
        self.possible = any(self._pointers.values())  # there is a float buffer with an integer beside it

    def votes(self, before: Mapping[str, Tensor], samples: int) -> dict[str, Vote]:
        """What a client's visit says of the buffers that it has changed and that have pointers beside them."""
        votes: dict[str, Vote] = {}
        for name, pointers in self._pointers.items():
            owner, key = self._owners[name]
            prefix, value, old = name.removesuffix(key), owner._buffers.get(key), before.get(name)
            then = {at: int(before.get(prefix + at, number)) for at, number in pointers.items()}
            if then and value is not None and old is not None and value.shape == old.shape:
                now = _pointers_of(owner)
                said = (_vote(old, value, then[at], now[at], samples) for at in then.keys() & now.keys())
                found = [vote for vote in said if vote is not None]
                if found:
                    votes[name] = min(found, key=_VOTES.index)
        return votes

    def heard(self, votes: Mapping[str, Any]) -> dict[str, Vote]:
        """Those of a client elsewhere, as far as they are of such buffers."""
        return {name: vote for name, vote in votes.items() if self._pointers.get(name) and vote in _VOTES}


def agreed(votes: Collection[Mapping[str, Vote]]) -> frozenset[str]:
    """The buffers that are banks, from what the clients of a round say."""
    names = {name for vote in votes for name in vote}
    said = {name: {vote[name] for vote in votes if name in vote} for name in names}
    return frozenset(name for name, given in said.items() if "no" not in given)


def _pointers_of(owner: nn.Module) -> dict[str, int]:
    """Integers that a submodule keeps, as attributes and as buffers of one number."""
    found = {name: value for name, value in vars(owner).items() if type(value) is int}
    for name, buffer in owner._buffers.items():
        if buffer is not None and buffer.numel() == 1 and not (buffer.is_floating_point() or buffer.is_complex()):
            found[name] = int(buffer)
    return found


def _vote(old: Tensor, new: Tensor, start: int, end: int, samples: int) -> Vote | None:
    """Whether a buffer was written under a pointer, along its rows or its columns; ``None``: it was not changed."""
    changed = ~equal_numbers(old, new)
    if start == end or min(start, end) < 0 or not bool(changed.any()):
        return None
    partly: list[list[bool]] = []
    for dim in {0, old.dim() - 1}:
        rows = changed.movedim(dim, 0).reshape(old.shape[dim], -1).any(1).tolist()
        if not all(rows):
            partly.append(rows)
    if partly:
        return "yes" if any(_is_under(rows, start, end) for rows in partly) else "no"
    if end < start:
        return "yes" if start <= max(old.shape) else None
    # Several times around, or a number that is no pointer: a pointer has moved by the samples.
    lengths = (old.shape[0], old.shape[-1])
    around = any(end <= length <= samples and (samples - end + start) % length == 0 for length in lengths)
    return "perhaps" if around else "no"


def _is_under(rows: list[bool], start: int, end: int) -> bool:
    """Whether the rows that were written are those that a pointer has passed, which may count on and on."""
    length = len(rows)
    if (end < start and start > length) or end - start >= length:
        return False
    first, last = start % length, end % length
    inside = [first <= row < last if first < last else row >= first or row < last for row in range(length)]
    return all(within for row, within in zip(rows, inside, strict=True) if row)
