# SPDX-License-Identifier: Apache-2.0
"""``self.log`` in steps that may come from plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fl_lightning.core.lightning.names import LightningModule

Record = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


class StepLog:
    """Notes what a plan logs, and passes on what is logged otherwise.

    It stays on the module for a whole visit: TorchDynamo checks a module whose attributes change much more slowly.

    Args:
        module: the module whose ``log`` is shadowed.

    Attributes:
        records: what was noted: name, value, further arguments.
        notes: calls are noted at the moment.
        passes: calls are passed on at the moment.
        to: what they are passed on to.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.records: list[Record] = []
        self.notes, self.passes = False, True
        self.to: Callable[..., None] = module.log
        self._shadow = _noting(self, self.records)

    def install(self) -> None:
        """Shadows the module's present ``log``, until somebody takes that off."""
        attributes = vars(self._module)
        present = attributes.get("log", self._module.log)
        if present is not self._shadow:
            self.to, attributes["log"] = present, self._shadow

    @contextmanager
    def installed(self, to: Callable[..., None]) -> Iterator[None]:
        """Shadows it meanwhile and passes calls on to something else."""
        attributes, before = vars(self._module), self.to
        had, present = "log" in attributes, attributes.get("log")
        self.to, attributes["log"] = to, self._shadow
        try:
            yield
        finally:
            self.to = before
            if had:
                attributes["log"] = present
            else:
                del attributes["log"]

    def begin(self, passes: bool) -> None:
        """Notes calls from now on, after forgetting the old ones.

        Args:
            passes: they are passed on, too.
        """
        self.records.clear()
        self.notes, self.passes = True, passes

    def end(self) -> None:
        """Notes no more, and passes calls on."""
        self.notes, self.passes = False, True

    def replay(self) -> None:
        """Passes on what was noted."""
        for name, value, args, kwargs in self.records:
            self.to(name, value, *args, **kwargs)


def _noting(log: StepLog, records: list[Record]) -> Callable[..., None]:
    def note(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if log.notes:
            # A copy, as Lightning makes one: the rest of the step may write into what was logged.
            records.append((name, value.detach().clone() if isinstance(value, Tensor) else value, args, kwargs))
        if log.passes:
            log.to(name, value, *args, **kwargs)

    return note
