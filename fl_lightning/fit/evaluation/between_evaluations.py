# SPDX-License-Identifier: Apache-2.0
"""What lasts from one evaluation to the next: what was said, what a module remembers, which processes divide clients.

What it remembers belongs to all clients, and is no client's own value: ``self.best = max(self.best, accuracy)`` in an
epoch-end hook is the best value of the whole model so far, and a client's own best is nowhere. Such a value is told by
running what logs it twice: with what is remembered, and without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

from fl_lightning.clients.visits import portable
from fl_lightning.core.errors import RankError
from fl_lightning.core.processes import fair_shares
from fl_lightning.fit.evaluation.client_parts import ClientPart, ClientParts
from fl_lightning.fit.loaders import EvaluationLoader
from fl_lightning.lightning.batches import num_loaders
from fl_lightning.lightning.inspection import averaging, users_callback
from fl_lightning.lightning.logged_values import ClientValues, LoggedRow
from fl_lightning.lightning.metric_state import updates_of
from fl_lightning.lightning.module.contents import is_equal
from fl_lightning.lightning.module.kept_objects import Kept, Names
from fl_lightning.lightning.module.object_state import WholeState
from fl_lightning.lightning.names import Callback, LightningModule, Trainer, rank_zero_info, rank_zero_warn
from fl_lightning.lightning.ranks import Ranks

_NOTHING = object()
_NAMED = 10  # clients in a warning


class Memory:
    """Knows what earlier evaluations have left in a module."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # logged names that depend on it
        self.is_empty = True
        self._module: LightningModule | None = None
        self._left: list[tuple[Kept, str | None, Any]] = []
        self._first: dict[tuple[int, str | None], tuple[Kept, Any]] = {}

    def begin(self, module: LightningModule, start: WholeState) -> None:
        """An evaluation begins."""
        if self._module is not module:
            self._module, self._first, self.names = module, {}, set()
        changed = [(kept, name, first) for (_, name), (kept, first) in self._first.items()]
        self._left = [one for one in changed if _differs(*one)]
        self.is_empty = not (self._left or any(map(updates_of, start.metrics.values())))

    def end(self, start: WholeState, but: set[int]) -> None:
        """An evaluation is over.

        ``start`` is what the module held at its first batch, ``but`` the ids of buffers that a callback has lent it.
        """
        for kept in start.changed_attributes():
            if id(kept.value) in but:
                continue
            names = {}
            if isinstance(kept, Names):
                bound, gone = kept.change()
                names = {name: kept.content.get(name, _NOTHING) for name in (*bound, *gone)}
            for name, first in names.items() if isinstance(kept, Names) else ((None, kept.content),):
                self._first.setdefault((id(kept.value), name), (kept, first))

    def forget(self) -> None:
        """Lets the module hold what it held before the first evaluation that has changed it; metrics apart."""
        for kept, name, first in self._left:
            if name is None:
                kept.put(first)
            else:
                kept.apply(({}, [name]) if first is _NOTHING else ({name: first}, []))

    def compare(self, one: LoggedRow, other: LoggedRow) -> None:
        """Notes what differs."""
        for name in {**one.values, **other.values}:
            if repr(one.values.get(name)) != repr(other.values.get(name)):  # NaN equals NaN here
                self.names.add(name)


def _differs(kept: Kept, name: str | None, first: Any) -> bool:
    if name is None:
        return not kept.is_same()
    now = kept.now().get(name, _NOTHING)
    return now is not first and not is_equal(now, first)


class Notices:
    """What all evaluations of a strategy have in common: what was said, and what they have left in the module."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.divisible: dict[str, ref[LightningModule]] = {}  # among processes, by stage
        self._said: set[str] = set()

    def warn(self, text: str) -> None:
        """Warns once."""
        if text not in self._said:
            self._said.add(text)
            rank_zero_warn(text)

    def name_missing(self, stage: str, clients: Sequence[str]) -> None:
        """Says who trains and is not evaluated."""
        where, some = "validation" if stage == "val" else "test", ", ".join(clients[:_NAMED])
        rest = f" and {len(clients) - _NAMED} more" if len(clients) > _NAMED else ""
        self.warn(
            f"clients that train and have nothing to be evaluated on in {where}: {some}{rest}. Their rows in tables "
            "are empty, and they count in no mean, worst or angle"
        )

    def inform(self, text: str) -> None:
        """Says it once."""
        if text not in self._said:
            self._said.add(text)
            rank_zero_info(text)


class Division:
    """Divides the clients of an evaluation among processes, if an earlier one has shown that they can be."""

    def __init__(
        self, trainer: Trainer, loader: EvaluationLoader, stage: str, notices: Notices, ranks: Ranks | None
    ) -> None:
        self._trainer, self._loader, self._stage, self._notices, self._ranks = trainer, loader, stage, notices, ranks
        self._module: LightningModule = trainer.lightning_module
        self._step = f"{type(self._module).__name__}.{'validation' if stage == 'val' else 'test'}_step"
        self._touches_loggers = False

    @property
    def is_divided(self) -> bool:
        """Whether other processes evaluate some of the clients."""
        return self._ranks is not None and self._loader.share is not None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a step: notices whether it writes to loggers itself, because rank 0 must then see all steps."""
        if self._ranks is None or self.is_divided:
            yield
            return
        loggers = self._trainer.loggers
        self._trainer.loggers = watched = _Watched(loggers)
        try:
            yield
        finally:
            self._touches_loggers |= watched.touched
            self._trainer.loggers = loggers

    def of_all(self, own: dict[int, ClientPart], parts: ClientParts, values: ClientValues) -> dict[int, ClientPart]:
        """What the clients of all processes have added, in the order of clients."""
        reason = self._obstacle(parts, values)
        if reason is not None:
            raise RankError(
                f"{self._step} {reason}, which it did not in the first evaluation, and other processes have evaluated "
                "other clients: log values in the step, or gather them in torchmetrics"
            )
        assert self._ranks is not None
        for part in own.values():
            if part.row.error is not None:
                part.row.error = portable(part.row.error)
        return dict(sorted(pair for some in self._ranks.gather(own) for pair in some.items()))

    def _obstacle(self, parts: ClientParts | None, values: ClientValues) -> str | None:
        """Why one process must evaluate all clients; ``None`` if they can be divided."""
        if parts is None or num_loaders(self._trainer) > 1:
            return "is not the only one that runs"
        if parts.passed_on or parts.gathers:
            return f"carries on {', '.join(parts.passed_on) or 'a list'} from one client to the next"
        if self._notices.memory.names or parts.adds_to_older_metrics:
            return "depends on what earlier evaluations have left"
        if self._touches_loggers:
            return "writes to loggers itself"
        if values.logs_steps:
            return "logs values of single batches (on_step=True)"
        callback = batch_callback(self._trainer, self._stage)
        return None if callback is None else f"is watched by {callback}"

    def divide_next(self, parts: ClientParts | None, values: ClientValues) -> None:
        """Lets the next evaluation divide the clients, unless there is a reason against it in any process."""
        ranks, loader = self._ranks, self._loader
        if ranks is None or loader.share is not None or loader.num_evaluated < ranks.size:
            return
        if any(reasons := ranks.gather(self._obstacle(parts, values))):
            said = next(filter(None, reasons))
            self._notices.inform(f"every process evaluates all clients, because {self._step} {said}")
            return
        self._notices.divisible[self._stage] = ref(self._module)
        loader.share = fair_shares(loader.counts, ranks.size)[ranks.rank]

    def divide_again(self) -> None:
        """Divides the clients of this evaluation if an earlier one of the same module has shown that it can."""
        ranks, loader, shown = self._ranks, self._loader, self._notices.divisible.get(self._stage)
        if ranks is None or shown is None or shown() is not self._module or loader.num_evaluated < ranks.size:
            return
        if num_loaders(self._trainer) == 1 and batch_callback(self._trainer, self._stage) is None:
            loader.share = fair_shares(loader.counts, ranks.size)[ranks.rank]


class _Watched(list[Any]):
    touched = False

    def __getitem__(self, index: Any) -> Any:
        self.touched = True
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        self.touched = True
        return super().__iter__()


def batch_callback(trainer: Trainer, stage: str) -> str | None:
    """Whose hooks look at single evaluation batches, or change the model for an evaluation; ``None``: nobody's."""
    word = {"val": "validation", "test": "test"}[stage]
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found = users_callback(callbacks, f"on_{word}_batch_start", f"on_{word}_batch_end") or averaging(callbacks)
    return None if found is None else type(found).__name__
