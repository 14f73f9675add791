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

Vote = Literal["yes", "perhaps", "no"]
_VOTES: tuple[Vote, ...] = ("yes", "perhaps", "no")


class MemoryBanks:
    """Finds the banks of a module by what visits do to its buffers.

    Args:
        module: the module.
    """

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

    @property
    def possible(self) -> bool:
        """Whether there is a float buffer with an integer beside it."""
        return any(self._pointers.values())

    def votes(self, before: Mapping[str, Tensor], samples: int) -> dict[str, Vote]:
        """What a client's visit says of the buffers that it has changed and that have pointers beside them.

        Args:
            before: the round's buffers by name.
            samples: that the visit has seen.
        """
        votes: dict[str, Vote] = {}
        for name, then in self._pointers.items():
            owner, key = self._owners[name]
            value, old = owner._buffers.get(key), before.get(name)
            if then and value is not None and old is not None and value.shape == old.shape:
                now = _pointers_of(owner)
                said = (_vote(old, value, then[at], now[at], samples) for at in then.keys() & now.keys())
                found = [vote for vote in said if vote is not None]
                if found:
                    votes[name] = min(found, key=_VOTES.index)
        return votes


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
    changed = (old != new) & ~((old != old) & (new != new))
    if not bool(changed.any()):
        return None
    votes = set[Vote]()
    for dim in {0, old.dim() - 1}:
        length = old.shape[dim]
        if start == end or not (0 <= start <= length and 0 <= end <= length):
            continue
        rows = changed.movedim(dim, 0).reshape(length, -1).any(1).tolist()
        inside = [start <= row < end if start < end else row >= start or row < end for row in range(length)]
        if all(rows):
            # Several times around, or a pointer that is none: it has moved by the samples if it is one.
            votes.add("yes" if end < start else "perhaps" if (start + samples - end) % length == 0 else "no")
        else:
            votes.add("yes" if all(within for row, within in zip(rows, inside, strict=True) if row) else "no")
    return min(votes, key=_VOTES.index, default=None)
