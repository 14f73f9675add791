# SPDX-License-Identifier: Apache-2.0
"""What all evaluations of a strategy have in common."""

from __future__ import annotations

from weakref import ref

from fl_lightning.fit.evaluation.leaks_between_evaluations import Memory
from fl_lightning.lightning.names import LightningModule, rank_zero_info, rank_zero_warn


class Notices:
    """What all evaluations of a strategy have in common: what was said, and what they have left in the module.

    Attributes:
        memory: what evaluations have left in the module.
        divisible: modules of whose evaluation, by stage, the clients can be divided among processes.
    """

    def __init__(self) -> None:
        self.memory = Memory()
        self.divisible: dict[str, ref[LightningModule]] = {}
        self._said: set[str] = set()

    def warn(self, text: str) -> None:
        """Warns once."""
        if text not in self._said:
            self._said.add(text)
            rank_zero_warn(text)

    def inform(self, text: str) -> None:
        """Says it once."""
        if text not in self._said:
            self._said.add(text)
            rank_zero_info(text)
