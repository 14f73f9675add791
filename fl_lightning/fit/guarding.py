# SPDX-License-Identifier: Apache-2.0
"""The guards of a fit, one after the other, between the uploads of a round and the method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fl_lightning.algorithms.guards.base import Guard
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage import rule_state
from fl_lightning.core.updates import Columns

_MANY = 100_000
"""Clients among which a guard's smallest cohort is looked for."""


def check_guards(guards: Sequence[Guard], most: int, who: str) -> None:
    """Refuses guards that can judge no round, and says how many reports it takes."""
    for guard in guards:
        judged = [m for m in range(1, most + 1) if guard.needed(m) <= m]
        if not judged:
            enough = next((m for m in range(most + 1, _MANY) if guard.needed(m) <= m), None)
            takes = "which no number of clients is enough for" if enough is None else f"which takes {enough} of them"
            raise ValueError(
                f"guard must be able to judge rounds with {who}, found {guard!r}, {takes}: sample more clients per "
                "round, or lower the numbers that the guard was given"
            )
        most = max(map(guard.max_remaining, judged))
        who = f"the {most} clients at most whom {guard!r} leaves"


def guarded(
    guards: Sequence[Guard],
    cohort: Cohort,
    rebuild: Callable[[list[int], bool], Cohort],
    leave_out: Callable[[int, str], None],
) -> tuple[Cohort, dict[str, float]]:
    """Lets every guard see what the one before has left; rows change in place.

    Returns what the method sees, and numbers to log by the guard's class, with ``_2`` for the second of a class.

    ``rebuild`` makes the cohort anew, from the clients at these of its present places; its second argument says whether
    rows have changed since their norms were taken. ``leave_out`` is called with each client's place in the cohort that
    came in and the reason, also when a later guard raises CannotGuardError.
    """
    places, scalars, changed = list(range(len(cohort))), dict[str, float](), False
    kinds = [type(guard).__name__ for guard in guards]
    for index, guard in enumerate(guards):
        earlier = kinds[:index].count(kinds[index])
        verdict = guard.judge(cohort)
        stay = verdict.remaining(len(cohort))
        for place, reason in sorted(verdict.left_out.items()):
            leave_out(places[place], reason)
        named = {"left_out": float(len(verdict.left_out)), **verdict.scalars}
        scalars |= {f"{kinds[index]}{f'_{earlier + 1}' * (earlier > 0)}/{name}": each for name, each in named.items()}
        places = [places[place] for place in stay]
        if verdict.left_out or verdict.changes_rows:
            changed = changed or verdict.changes_rows
            cohort = rebuild(stay, changed)
            verdict.change(cohort.updates.rows, stay)
    return cohort, scalars


def guard_states(guards: Sequence[Guard], columns: Columns) -> dict[str, Any]:
    """What a checkpoint holds of each guard."""
    return {name: rule_state.sharded_state_dict(guard, columns) for name, guard in _named(guards)}


def load_guard_states(
    guards: Sequence[Guard], states: Mapping[str, Any], columns: Columns, ids: Mapping[int, int]
) -> None:
    """Restores what :func:`guard_states` returned; guards that it lacks begin anew."""
    for name, guard in _named(guards):
        rule_state.reset(guard)
        if name in states:
            rule_state.load_sharded_state_dict(guard, states[name], columns, ids)


def _named(guards: Sequence[Guard]) -> list[tuple[str, Guard]]:
    return [(f"{type(guard).__name__} {place}", guard) for place, guard in enumerate(guards)]
