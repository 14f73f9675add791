# SPDX-License-Identifier: Apache-2.0
"""The guards of a fit, one after the other, between the uploads of a round and the method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fl_lightning.algorithms.guards.base import Guard
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage import kept
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
        most = max(map(guard.most_left, judged))
        who = f"the {most} clients at most whom {guard!r} leaves"


class Guards:
    """Runs the guards of a fit."""

    def __init__(self, guards: Sequence[Guard]) -> None:
        self.each, kinds = guards, [type(guard).__name__ for guard in guards]
        earlier = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
        self._logged = [f"{kind}_{k + 1}" if k else kind for kind, k in zip(kinds, earlier, strict=True)]

    def guarded(
        self, cohort: Cohort, rebuild: Callable[[list[int], bool], Cohort], leave_out: Callable[[int, str], None]
    ) -> tuple[Cohort, dict[str, float]]:
        """Lets every guard see what the one before has left; rows change in place.

        Returns what the method sees, and numbers to log by the guard's class, with ``_2`` for the second of a class.

        ``rebuild`` makes the cohort anew, from the clients at these of its present places; its second argument says
        whether rows have changed since their norms were taken. ``leave_out`` is called with each client's place in the
        cohort that came in and the reason, also when a later guard raises CannotGuardError.
        """
        places, scalars, changed = list(range(len(cohort))), dict[str, float](), False
        for guard, logged in zip(self.each, self._logged, strict=True):
            verdict = guard.judge(cohort)
            stay = verdict.kept(len(cohort))
            for place, reason in sorted(verdict.left_out.items()):
                leave_out(places[place], reason)
            named = {"left_out": float(len(verdict.left_out)), **verdict.scalars}
            scalars |= {f"{logged}/{name}": value for name, value in named.items()}
            places = [places[place] for place in stay]
            if verdict.left_out or verdict.changes_rows:
                changed = changed or verdict.changes_rows
                cohort = rebuild(stay, changed)
                verdict.change(cohort.updates.rows, stay)
        return cohort, scalars

    def reset(self) -> None:
        """A fresh fit begins."""
        for guard in self.each:
            kept.reset(guard)

    def state_dict(self, columns: Columns) -> dict[str, Any]:
        """What a checkpoint holds of each guard."""
        return {name: kept.saved(guard, columns) for name, guard in self._named()}

    def load_state_dict(self, states: Mapping[str, Any], columns: Columns, ids: Mapping[int, int]) -> None:
        """Restores what :meth:`state_dict` returned; guards that it lacks begin anew."""
        self.reset()
        for name, guard in self._named():
            if name in states:
                kept.restore(guard, states[name], columns, ids)

    def _named(self) -> list[tuple[str, Guard]]:
        return [(f"{type(guard).__name__} {place}", guard) for place, guard in enumerate(self.each)]
