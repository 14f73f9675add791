# SPDX-License-Identifier: Apache-2.0
"""``self.log`` in steps that may come from plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fl_lightning.lightning.names import LightningModule


class StepLog:
    """Shadows a module's ``log``: notes calls, to pass them on later, or passes them on at once.

    It stays for a whole visit: TorchDynamo checks a module whose attributes change much more slowly.

    Attributes:
        records: what was noted: name, value, further arguments.
        notes: calls are noted at the moment.
        to: what they are passed on to.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module, self._shadow = module, _noting(self)
        self.records: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
        self.notes = False
        self.to: Callable[..., None] = module.log

    def install(self) -> None:
        """Shadows the module's present ``log``, until somebody takes that off."""
        attributes = vars(self._module)
        present = attributes.get("log", self._module.log)
        if present is not self._shadow:
            self.to, attributes["log"] = present, self._shadow

    def replay(self) -> None:
        """Passes on what was noted."""
        for name, value, args, kwargs in self.records:
            self.to(name, value, *args, **kwargs)


def _noting(log: StepLog) -> Callable[..., None]:
    def note(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if log.notes:
            # A copy, as Lightning makes one: the rest of the step may write into what was logged.
            log.records.append((name, value.detach().clone() if isinstance(value, Tensor) else value, args, kwargs))
        else:
            log.to(name, value, *args, **kwargs)

    return note
