# SPDX-License-Identifier: Apache-2.0
"""What one client's evaluation logged."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any


@dataclass
class LoggedRow:
    """One client's values by logged name, and what is known about them.

    Attributes:
        values: the numbers; NaN where a metric is undefined for this client.
        undefined: why, for each name whose value is NaN.
        larger_is_better: ``higher_is_better`` of the metrics that the numbers come from, where they say.
        error: what the module raised, if it did not come to its end.
    """

    values: dict[str, float] = field(default_factory=dict)
    undefined: dict[str, str] = field(default_factory=dict)
    larger_is_better: dict[str, bool] = field(default_factory=dict)
    error: Exception | None = None

    def add(self, name: str, value: float, reason: str | None = None) -> None:
        """Keeps a number."""
        self.values[name] = nan if reason is not None else value
        self.undefined.pop(name, None)
        if isnan(self.values[name]):
            self.undefined[name] = reason or "it is NaN"

    def note_direction(self, name: str, metric: Any) -> None:
        """Keeps which end of a metric is good, if its class says so."""
        better = getattr(metric, "higher_is_better", None)
        if isinstance(better, bool):
            self.larger_is_better[name] = better

    def update(self, other: LoggedRow, prefix: str = "") -> None:
        """Takes over what another row holds, under longer names if asked for."""
        self.values.update({prefix + name: value for name, value in other.values.items()})
        self.undefined.update({prefix + name: reason for name, reason in other.undefined.items()})
        self.larger_is_better.update({prefix + name: better for name, better in other.larger_is_better.items()})
