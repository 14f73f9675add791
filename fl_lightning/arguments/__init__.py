# SPDX-License-Identifier: Apache-2.0
"""The one place that checks arguments of public constructors and functions. Uses nothing else of the package.

``@checked`` stands on a function, on an ``__init__`` or on a dataclass. It reads the annotations at the first call, so
kinds and choices are written once, and takes what holds besides as arguments of its own::

    @checked(alpha=Bounds(0, 1), history_device=DEVICE)
    def __init__(self, alpha: float = 0.1, reading: Reading = "library", history_device: str | None = None) -> None:

An error names argument, rule and value: a TypeError where the value is of another kind, otherwise a ValueError. Numbers
must be finite, strings must not be empty, and bools are not numbers. Numbers of numpy and tensors without dimensions
become Python's. Defaults are not checked.

The library calls what it has checked once by ``trusted``, which leaves the checks out::

    trusted(RoundRecord)(round=3, ...)
    altered(record, local_steps=12)
"""

from fl_lightning.arguments.checked import altered, check, check_unused, checked, nearest, shown, trusted
from fl_lightning.arguments.kinds import ANY, DEVICE, FILLED, TEXT, Bounds, Example, Text, has_numbers, listed

__all__ = [
    "ANY", "DEVICE", "FILLED", "TEXT", "Bounds", "Example", "Text", "altered", "check", "check_unused", "checked",
    "has_numbers", "listed", "nearest", "shown", "trusted",
]  # fmt: skip
