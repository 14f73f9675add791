# SPDX-License-Identifier: Apache-2.0
"""Objects that a module leads to, and what they held at a moment: compared, put back in place, changed as elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from itertools import repeat
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.amp import GradScaler

from fl_lightning.core.errors import ModuleError
from fl_lightning.lightning.module.generators import GENERATORS, generator_state, put_generator_state
from fl_lightning.lightning.module.values import LARGE, OTHERS, is_equal, is_followed, runs_on, same_numbers, slots_of

Edit = tuple[str, list[Any]]
"""What has happened to an object: ``"bound", [name, value]`` and ``"gone", [name]`` of attributes, items ``"added"`` to
the end, or the ``"whole"`` content, in a list of one."""


class Object(ABC):
    """One object and what it held when it was looked at.

    ``name`` is the module's attribute that leads to it, and ``path`` the way to it from there.
    """

    gathers = True  # from step to step
    """Whether what it holds may tell of samples."""

    def __init__(self, value: Any, name: str, path: str = "") -> None:
        self.value, self.name, self.path = value, name, path
        self.content = self.read()

    def read(self) -> Any:
        """What it holds now; later changes do not reach that."""
        return self.value.detach().clone()

    def is_same(self) -> bool:
        """Whether it holds what it held; objects in it are looked at by themselves."""
        return bool(self.read() == self.content)

    @abstractmethod
    def put(self, content: Any) -> None:
        """Lets it hold what :meth:`read` returned."""

    def restore(self) -> None:
        """Lets it hold what it held."""
        self.put(self.content)

    def parts(self) -> Iterable[tuple[Any, str, str]]:
        """Objects in the content, the attributes that lead to them, and the ways from there."""
        return ()

    def edits(self) -> list[Edit]:
        """What has happened to it since."""
        return [("whole", [self.read()])]

    def apply(self, form: str, values: list[Any]) -> None:
        """Repeats one of the :meth:`edits`."""
        self.put(values[0])

    def changed_names(self) -> list[str]:
        """The attributes of the module that a change shows in."""
        return [self.name]


class Attributes(Object):
    """The attributes of an object, in ``__dict__`` and slots, but for those that are ``apart``."""

    def __init__(self, value: Any, name: str, path: str = "", apart: frozenset[str] = frozenset()) -> None:
        self._apart, self._slots = apart, slots_of(type(value))
        super().__init__(value, name, path)

    def read(self) -> dict[str, Any]:
        """By name."""
        own = {name: value for name, value in getattr(self.value, "__dict__", {}).items() if name not in self._apart}
        return {name: getattr(self.value, name) for name in self._slots if hasattr(self.value, name)} | own

    def is_same(self) -> bool:
        """Called for every submodule before and after every visit."""
        own: dict[str, Any] = self.read() if self._slots else vars(self.value)
        then = self.content
        if not all(map(is_, map(own.get, then, repeat(self)), then.values())):
            return False
        return bool(len(own) == len(then) + sum(map(own.__contains__, self._apart)))

    def put(self, content: dict[str, Any]) -> None:
        """Binds them, and deletes others."""
        now = self.read()
        edits: list[Edit] = [("gone", [name]) for name in now if name not in content]
        for edit in edits + [("bound", [n, v]) for n, v in content.items() if now.get(n, self) is not v]:
            self.apply(*edit)

    def parts(self) -> Iterable[tuple[Any, str, str]]:
        """Copies may have their attributes in another order."""
        return [(self.content[name], self.name, f"{self.path}.{name}") for name in sorted(self.content)]

    def edits(self) -> list[Edit]:
        """Of attributes that mean something else now: caches are bound to the same again."""
        then, now = self.content, self.read()
        bound: list[Edit] = [("bound", [n, v]) for n, v in now.items() if not is_equal(v, then.get(n, self))]
        return bound + [("gone", [name]) for name in then if name not in now]

    def apply(self, form: str, values: list[Any]) -> None:
        """Binds one, or deletes it."""
        name, own = values[0], getattr(self.value, "__dict__", {})
        if form == "bound" and name in self._slots:
            object.__setattr__(self.value, name, values[1])  # dataclasses may be frozen
        elif form == "bound":
            own[name] = values[1]  # nn.Module's own way of setting one would register it
        elif name in own:
            del own[name]
        elif name in self._slots and hasattr(self.value, name):
            object.__delattr__(self.value, name)

    def shown_as(self, name: str) -> str:
        """The module's attribute that one of them shows in."""
        return self.name

    def changed_names(self) -> list[str]:
        """The module's attributes that mean something else now."""
        return [self.shown_as(values[0]) for _, values in self.edits()]


class _Items(Object):
    """A list, a deque, a dictionary or a set."""

    def read(self) -> Any:
        if isinstance(self.value, dict):
            return dict(self.value.items())
        return set(self.value) if isinstance(self.value, set) else list(self.value)

    def is_same(self) -> bool:
        value, then = self.value, self.content
        if isinstance(value, dict):
            return same_entries(value, then)
        return bool(value == then) if isinstance(value, set) else len(value) == len(then) and all(map(is_, value, then))

    def put(self, content: Any) -> None:
        self.value.clear()
        self.value.update(content) if isinstance(self.value, (dict, set)) else self.value.extend(content)

    def parts(self) -> Iterable[tuple[Any, str, str]]:
        steps = [(f"[{place}]", item) for place, item in enumerate(self.content)]
        if isinstance(self.content, dict):  # keys that are numbers may be ids of this process
            steps = [(f"<{place}>", key) for place, key in enumerate(self.content)]
            steps += [(f"[{k if isinstance(k, str) else at}]", v) for at, (k, v) in enumerate(self.content.items())]
        return [(part, self.name, self.path + step) for step, part in steps]

    def edits(self) -> list[Edit]:
        then, now = self.content, self.read()
        if isinstance(now, list):
            full = isinstance(self.value, deque) and len(now) == self.value.maxlen  # the first ones may have fallen out
            for rest in (then[dropped:] for dropped in range(len(then) + 1 if full else 1)):
                if len(rest) <= len(now) and all(map(is_, rest, now)):
                    return [("added", now[len(rest) :])]
        return [("whole", [now])]

    def apply(self, form: str, values: list[Any]) -> None:
        self.value.extend(values) if form == "added" else self.put(values[0])


class _Numbers(Object):
    """A tensor."""

    def is_same(self) -> bool:
        return same_numbers(self.value, self.content)

    @torch.no_grad()
    def put(self, content: Tensor) -> None:
        tensor = self.value
        if (tensor.shape, tensor.dtype, tensor.device) == (content.shape, content.dtype, content.device):
            (tensor.data if tensor.layout == torch.strided else tensor).copy_(content)
        else:
            tensor.data = content.clone()


class _Array(Object):
    """An array of numpy's."""

    def read(self) -> Any:
        return self.value.copy()

    def is_same(self) -> bool:
        return bool(self.value.shape == self.content.shape and self.value.tobytes() == self.content.tobytes())

    def put(self, content: Any) -> None:
        if self.value.shape != content.shape:
            self.value.resize(content.shape, refcheck=False)
        self.value[...] = content

    def parts(self) -> Iterable[tuple[Any, str, str]]:
        items = self.content.ravel().tolist() if self.content.dtype.hasobject else ()
        return [(item, self.name, f"{self.path}[{place}]") for place, item in enumerate(items)]


class _Generator(Object):
    """A random generator."""

    gathers = False

    def read(self) -> Any:
        return generator_state(self.value)

    def is_same(self) -> bool:
        now = self.read()
        return torch.equal(now, self.content) if isinstance(now, Tensor) else repr(now) == repr(self.content)

    def put(self, content: Any) -> None:
        put_generator_state(self.value, content)


class _Scaler(Object):
    """A gradient scaler, between two steps."""

    def read(self) -> dict[str, Any]:
        return self.value.state_dict()  # type: ignore[no-any-return]

    def put(self, content: dict[str, Any]) -> None:
        self.value.load_state_dict(content)
        self.value._per_optimizer_states.clear()  # of a step that broke off


class Constant(Object):
    """What is too large to be copied: tensors and long lists that only a data set leads to."""

    def read(self) -> int:
        """A mark of its changes."""
        return self.value._version if isinstance(self.value, Tensor) else len(self.value)

    def put(self, content: Any) -> None:
        """Nobody knows what it held."""
        self.content = self.read()
        raise ModuleError(
            "a data set that a module keeps must not change while clients train or are evaluated, found changes in "
            f"{self.name!r}: keep what changes in a buffer, or in a tensor or a list of the module's own"
        )


def objects_in(value: Any, name: str, path: str = "", of_data: bool = False) -> list[Object] | None:
    """What can change in a value: its content, its attributes, both or nothing; ``None``: nobody can put it back.

    ``of_data`` says that only a data set leads to it.
    """
    if isinstance(value, OTHERS):
        return []
    if isinstance(value, Tensor):
        # A tensor with a graph is a result. Nobody writes into it, nor into one of inference mode in training.
        result = value.grad_fn is not None or (value.is_inference() and not torch.is_inference_mode_enabled())
        fixed = result or value.is_meta or value.is_quantized
        return [] if fixed else [(Constant if of_data else _Numbers)(value, name, path)]
    kind: type[Object] | None = None
    if isinstance(value, (list, deque, dict, set)):
        kind = Constant if of_data and len(value) > LARGE // 100 else _Items
    elif isinstance(value, np.ndarray):
        kind = _Array if value.flags.writeable and not (of_data and value.nbytes > LARGE) else None
    elif isinstance(value, GENERATORS):
        kind = _Generator
    elif isinstance(value, GradScaler):
        kind = _Scaler
    elif runs_on(value):
        return None
    found: list[Object] = [] if kind is None else [kind(value, name, path)]
    if not is_followed(value):
        return found
    return [*found, Attributes(value, name, path)] if hasattr(value, "__dict__") or slots_of(type(value)) else found


def changed(objects: Iterable[Object]) -> list[Object]:
    """Those that hold something else now."""
    return [found for found in objects if not found.is_same()]


def same_entries(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    """Whether keys and values are the same objects in the same order."""
    return len(now) == len(then) and all(map(is_, now, then)) and all(map(is_, now.values(), then.values()))
