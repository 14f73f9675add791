# SPDX-License-Identifier: Apache-2.0
"""What copies of a module have in common."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.amp.grad_scaler import OptState

from fl_lightning.lightning.module.objects import attributes_of

_FACTORIES: dict[str | None, Any] = {None: None, **{kind.__name__: kind for kind in (list, dict, set, int, float)}}


class Shared:
    """What values may refer to: objects that both sides have, by path, and classes and factories, by name."""

    def __init__(self, by_path: Mapping[str, Any], module: object = None) -> None:
        self.by_path = by_path
        self.paths = {id(value): path for path, value in [*by_path.items()][::-1]}
        inside = [part for value in by_path.values() for part in _inside(value)]
        self.classes = {kind.__qualname__: kind for kind in map(type, (*by_path.values(), *inside))}
        self.classes |= {OptState.__qualname__: OptState, **_classes_beside(type(module))}
        found = [value.default_factory for value in by_path.values() if isinstance(value, defaultdict)]
        self.factories = {**{getattr(f, "__qualname__", ""): f for f in found}, **_FACTORIES}


def _inside(value: Any) -> Iterable[Any]:
    values = value if isinstance(value, (list, deque, tuple)) else value.values() if isinstance(value, dict) else ()
    return (*values, *attributes_of(value).values())


def _classes_beside(kind: type) -> dict[str, type]:
    """Classes of the files that define a module's class and its bases, by name."""
    homes = {base.__module__ for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module}
    homes = {home for home in homes if home.partition(".")[0] not in ("torch", "lightning", "pytorch_lightning")}
    files = [vars(sys.modules[home]) for home in sorted(homes) if home in sys.modules]
    found = [value for names in files for value in list(names.values()) if isinstance(value, type)]
    return {value.__qualname__: value for value in found if value.__module__ in homes}
