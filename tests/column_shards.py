# SPDX-License-Identifier: Apache-2.0
"""A server's work divided among threads, each of which holds a shard of the columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage import rule_state
from fl_lightning.core.storage.rule_state import ColumnShard
from fl_lightning.core.updates import Columns, UpdateMatrix

_SECONDS = 60.0


class Meeting:
    """Where threads exchange tensors: every shard calls :meth:`gather` at the same places."""

    def __init__(self, shards: int) -> None:
        self._slots: list[Tensor] = [torch.empty(0)] * shards
        self._barrier = Barrier(shards)

    def gather(self, shard: int, mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        assert len(mine) == sizes[shard]
        self._slots[shard] = mine
        self._barrier.wait(_SECONDS)
        found = list(self._slots)
        assert list(map(len, found)) == list(sizes)
        self._barrier.wait(_SECONDS)
        return found

    def abort(self) -> None:
        self._barrier.abort()


def shared(cohort: Cohort, columns: Columns) -> Cohort:
    """What one shard holds of a cohort."""
    begin, end = columns.borders[columns.shard], columns.borders[columns.shard + 1]

    def part(matrix: UpdateMatrix) -> UpdateMatrix:
        return UpdateMatrix(matrix.rows[:, begin:end].clone(), matrix.layout, columns)

    ask = cohort.losses_at
    return replace(
        cohort,
        params=cohort.params[begin:end].clone(),
        updates=part(cohort.updates),
        companions={name: part(matrix) for name, matrix in cohort.companions.items()},
        losses_at=None if ask is None else (lambda params: ask(columns.joined(params))),
    )


@dataclass(frozen=True)
class Work:
    """What the shards found: per round the whole step and the first shard's report, and the states at the end."""

    steps: list[Tensor]
    reports: list[Any]
    state: Any


def in_shards(total: int, shards: int, work: Callable[[Columns], Any]) -> list[Any]:
    """What ``work`` returns in ``shards`` threads, each of which has a shard of ``total`` columns."""
    meeting, borders = Meeting(shards), Columns.cut(total, shards)

    def one(shard: int) -> Any:
        columns = Columns(borders, shard, lambda mine, sizes: meeting.gather(shard, mine, sizes))
        try:
            return work(columns if shards > 1 else Columns.whole(total))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(shards) as pool:
        return [future.result() for future in [pool.submit(one, shard) for shard in range(shards)]]


def divided(make: Callable[[], tuple[Any, Any]], cohorts: Sequence[Cohort], shards: int) -> Work:
    """Lets ``shards`` threads aggregate the cohorts, each with a pair of rules of its own and its own columns."""

    def work(columns: Columns) -> Work:
        torch.manual_seed(0)
        server, client = make()
        assert server.columnwise
        assert client.columnwise
        steps, reports = [], []
        for cohort in cohorts:
            own = shared(cohort, columns)
            step = client.adjust_step(own, server.aggregate(own))
            client.commit(own)
            steps.append(step)
            reports.append(server.report)
        return Work(steps, reports, [rule_state.state_dict(rule, columns) for rule in (server, client)])

    found = in_shards(cohorts[0].updates.layout.numel, shards, work)
    assert all(str(other.reports) == str(found[0].reports) for other in found), "shards must report the same"
    steps = [torch.cat(parts) for parts in zip(*(one.steps for one in found), strict=True)]
    return Work(steps, found[0].reports, joined([one.state for one in found]))


def joined(states: Sequence[Any]) -> Any:
    """States of all shards as one: what lies in columns side by side, and the rest, in which they agree."""
    first = states[0]
    if isinstance(first, ColumnShard):
        return torch.cat([state.values for state in states], -1)
    if isinstance(first, dict):
        return {key: joined([state[key] for state in states]) for key in first}
    if isinstance(first, (list, tuple)):
        return [joined(list(parts)) for parts in zip(*states, strict=True)]
    assert all(same(state, first) for state in states), "what does not lie in columns must be the same everywhere"
    return first


def same(one: Any, two: Any) -> bool:
    """Whether two states have the same bits; NaN equals NaN."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(_bits(one), _bits(two))
    return bool(one == two)


def _bits(tensor: Tensor) -> Tensor:
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    return tensor.contiguous().view(kinds[tensor.dtype.itemsize])
