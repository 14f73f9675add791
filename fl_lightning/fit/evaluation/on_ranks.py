# SPDX-License-Identifier: Apache-2.0
"""An evaluation divided among processes: what clients add is joined in their order, as in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from fl_lightning.clients.visits import portable
from fl_lightning.core.errors import RankError
from fl_lightning.core.processes import fair_shares
from fl_lightning.fit.evaluation.between_evaluations import Notices
from fl_lightning.fit.evaluation.client_parts import ClientPart, ClientParts
from fl_lightning.fit.evaluation.loader import EvaluationLoader
from fl_lightning.lightning.evaluation_batches import num_loaders
from fl_lightning.lightning.inspection import averaging, users_callback
from fl_lightning.lightning.logged_values import ClientValues
from fl_lightning.lightning.names import Callback, LightningModule, Trainer
from fl_lightning.lightning.ranks import Ranks


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
        if parts.passed_on or parts.grown:
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
