# SPDX-License-Identifier: Apache-2.0
"""Names that a fit uses itself in the rules, guards, attacks and samplers that users write."""

from __future__ import annotations

import inspect
from typing import Any


def refuse_taken_names(part: object, base: type[Any]) -> None:
    """Refuses attributes and arguments with names under which a fit finds a method, or what a round gave.

    Args:
        part: a class as it is created, or an object with the attributes that its constructor has made.
        base: the class of this package that it derives from.

    Raises:
        TypeError: a name is taken.
    """
    kind = part if isinstance(part, type) else type(part)
    methods = {name for name, entry in vars(base).items() if inspect.isfunction(entry) and name[0] != "_"}
    given = {name for name in methods if not callable(getattr(part, name))}
    given |= inspect.signature(kind).parameters.keys()
    taken = sorted(methods | vars(base).keys() & {"report", "scalars"})
    for name in given.intersection(taken):
        raise TypeError(f"{kind.__name__} must call its {name!r} something else: a fit uses {', '.join(taken)} itself")
