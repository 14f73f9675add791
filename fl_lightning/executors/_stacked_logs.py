# SPDX-License-Identifier: Apache-2.0
"""What clients log while they train together, turned into calls of ``self.log`` for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.bench import LogCall

_PLAIN = frozenset({"logger", "on_epoch", "on_step", "prog_bar"})


@dataclass(frozen=True)
class Logged:
    """One call of ``self.log``: the values ``[g]`` of the clients, or one value that is everybody's."""

    name: str
    value: Any
    stacked: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StackedLogs:
    """Collects the calls of a chunk.

    Means are not handed over step by step: one call carries the mean of all steps but the last, with their samples, and
    another the last step. Epoch means, step values and progress bars come out the same, at two calls per client.

    Args:
        sizes: per client, the samples of each of its batches.
    """

    def __init__(self, sizes: Sequence[Sequence[int]]) -> None:
        self._sizes = sizes
        self._means: dict[Any, list[tuple[int, Sequence[int], Logged]]] = {}
        self._others: list[list[LogCall]] = [[] for _ in sizes]

    def add(self, step: int, chosen: Sequence[int], calls: Sequence[Logged]) -> None:
        """The calls of one step of some clients."""
        seen: dict[Any, int] = {}
        for logged in calls:
            if _is_plain_mean(logged):
                key = (logged.name, *logged.kwargs.items())
                seen[key] = seen.get(key, 0) + 1
                self._means.setdefault((key, seen[key]), []).append((step, chosen, logged))
                continue
            values = logged.value.unbind(0) if logged.stacked else [logged.value] * len(chosen)
            for k, value in zip(chosen, values, strict=True):
                call = LogCall(
                    "training_step", self._sizes[k][step], logged.name, value, logged.args, logged.kwargs
                )  # fmt: skip
                self._others[k].append(call)

    def calls(self) -> list[list[LogCall]]:
        """The calls of every client."""
        found = [list(others) for others in self._others]
        for entries in self._means.values():
            for k, call in self._condensed(entries):
                found[k].append(call)
        return found

    def _condensed(self, entries: Sequence[tuple[int, Sequence[int], Logged]]) -> Iterator[tuple[int, LogCall]]:
        first = entries[0][2]
        steps = max(len(sizes) for sizes in self._sizes)
        values = first.value.new_zeros(len(self._sizes), steps)
        weights = torch.zeros(len(self._sizes), steps, dtype=torch.int64)
        last = [-1] * len(self._sizes)
        for step, chosen, logged in entries:
            values[list(chosen), step] = logged.value
            for k in chosen:
                weights[k, step] = self._sizes[k][step]
                last[k] = step
        ends = torch.tensor([max(step, 0) for step in last]).unsqueeze(1)
        final = values.gather(1, ends.to(values.device)).squeeze(1)
        before = weights.scatter(1, ends, 0)
        totals = before.sum(1)
        wide = values if values.dtype.itemsize > 2 else values.float()
        means = (wide * before.to(wide)).sum(1) / totals.to(wide)
        columns = zip(means.to(values.dtype).unbind(), totals.tolist(), final.unbind(), last, strict=True)
        for k, (mean, total, value, step) in enumerate(columns):
            if total > 0:
                yield k, LogCall("training_step", total, first.name, mean, (), first.kwargs)
            if step >= 0:
                yield k, LogCall("training_step", self._sizes[k][step], first.name, value, (), first.kwargs)


def _is_plain_mean(logged: Logged) -> bool:
    value, options = logged.value, logged.kwargs
    return (
        logged.stacked
        and isinstance(value, Tensor)
        and value.dim() == 1
        and value.is_floating_point()
        and not logged.args
        and _PLAIN.issuperset(options)
        and all(option is None or isinstance(option, bool) for option in options.values())
    )
