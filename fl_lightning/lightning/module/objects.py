# SPDX-License-Identifier: Apache-2.0
"""Objects and what they held at a moment: compared, put back in place, changed to what others hold; and which."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import is_
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from fl_lightning.core.errors import ModuleError
from fl_lightning.lightning.metric_state import beside_states
from fl_lightning.lightning.module.contents import (
    ARRAY,
    BYTES,
    GENERATOR,
    ITEMS,
    NUMBERS,
    OF_DATA,
    PARAMETER_HOOKS,
    TABLES,
    Added,
    Kind,
    Step,
    is_equal,
    same_entries,
)  # fmt: skip
from fl_lightning.lightning.module.generators import GENERATORS
from fl_lightning.lightning.names import (
    Callback,
    LightningDataModule,
    LightningModule,
    Logger,
    SingleDeviceStrategy,
    Trainer,
)

FRAMEWORK = frozenset((*vars(nn.Module()), *vars(LightningModule()), "_hparams_initial"))
"""Attributes of modules that belong to torch and Lightning."""

_PARTS = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_OF_LIGHTNING = _PARTS | {
    "_trainer", "_fabric", "_current_fx_name", "_metric_attributes", "log", "log_dict", "federated_features",
}  # fmt: skip
"""What is another at every moment, too."""


class Bound(NamedTuple):
    """Attributes that were bound anew, and those that are gone."""

    values: dict[str, Any]
    gone: list[str]


class Object:
    """One object and what it held when it was looked at.

    ``name`` is the module's attribute that leads to it, and ``path`` the way to it from there.
    """

    def __init__(self, value: Any, name: str, kind: Kind, path: str = "") -> None:
        self.value, self.name, self.kind, self.path = value, name, kind, path
        self.content = kind.read(value)

    def is_same(self) -> bool:
        """Whether it holds what it held."""
        return self.kind.same(self.value, self.content)

    def now(self) -> Any:
        """What it holds now."""
        return self.kind.read(self.value)

    def put(self, content: Any) -> None:
        """Lets it hold what :meth:`now` returned."""
        self.kind.write(self.value, content)

    def restore(self) -> None:
        """Lets it hold what it held."""
        if self.kind is OF_DATA:  # nobody knows what that was
            self.content = self.now()
            raise ModuleError(
                "a data set that a module keeps must not change while clients train or are evaluated, found changes in "
                f"{self.name!r}: keep what changes in a buffer, or in a tensor or a list of the module's own"
            )
        self.put(self.content)

    def change(self) -> Any:
        """What has happened to it since: attributes that were :class:`Bound`, items :class:`Added`, or its content."""
        return self.kind.change(self.value, self.content, self.now())

    def apply(self, change: Any) -> None:
        """Repeats what :meth:`change` returned."""
        if isinstance(change, Bound):
            bind(self.value, change)
        elif isinstance(change, Added):
            self.value.extend(change.items)
        else:
            self.put(change)

    def changed_names(self) -> list[str]:
        """The attributes of the module that a change shows in."""
        if self.kind in (TABLES, PARAMETER_HOOKS):
            found, now = [], self.now()
            for at in {**self.content, **now}:
                before, after = self.content.get(at, {}), now.get(at, {})
                names = [n for n in {**before, **after} if after.get(n, self) is not before.get(n, self)]
                found += [at + n if isinstance(n, str) else at for n in names]  # hooks have numbers
            return found
        names = [n for part in self.change() for n in part] if self.kind in MODULES else [""]
        return [".".join(filter(None, (self.name, name))) for name in names]

    def parts(self) -> Iterable[tuple[Any, str, str]]:
        """Objects in the content, the attributes from which they are reached, and the ways from there."""
        if self.kind in MODULES:  # nobody changes what torch and Lightning have there
            at = f"{self.name}." if self.name else ""
            own = sorted(self.content.keys() - FRAMEWORK)
            return [(self.content[name], at + name, "") for name in own]
        return [(part, self.name, self.path + step) for step, part in self.kind.parts(self.content)]


def changed(objects: Iterable[Object]) -> list[Object]:
    """The objects that hold something else now."""
    return [found for found in objects if not found.is_same()]


# ---- attributes


def attributes_of(value: Any) -> dict[str, Any]:
    """What is in ``__dict__`` and in slots."""
    slots = {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def _difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> Bound:
    return Bound({n: v for n, v in now.items() if then.get(n, then) is not v}, [n for n in then if n not in now])


def bind(value: Any, change: Bound) -> None:
    """Binds attributes of an object, in slots or in ``__dict__``."""
    own, slots = getattr(value, "__dict__", {}), slots_of(type(value))
    for name in change.gone:
        if name in own:
            del own[name]
        elif name in slots and hasattr(value, name):
            object.__delattr__(value, name)
    for name, new in change.values.items():
        if name in slots:
            object.__setattr__(value, name, new)  # dataclasses may be frozen
        else:
            own[name] = new  # nn.Module's own way of setting one would register it


def _attributes(read: Callable[[Any], dict[str, Any]], same: Callable[[Any, Any], bool]) -> Kind:
    def write(value: Any, content: dict[str, Any]) -> None:
        bind(value, _difference(read(value), content))

    def parts(content: dict[str, Any]) -> list[Step]:  # copies may have their attributes in another order
        return [(f".{name}", content[name]) for name in sorted(content)]

    return Kind(read, same, write, parts, lambda value, then, now: _difference(then, now))


def _module_attributes(apart: frozenset[str]) -> Kind:
    def same(value: Any, content: dict[str, Any]) -> bool:  # called for every submodule before and after every visit
        own = vars(value)
        if not all(map(is_, map(own.get, content), content.values())):
            return False
        return bool(len(own) == len(content) + sum(map(own.__contains__, apart)))

    return _attributes(lambda value: {n: v for n, v in vars(value).items() if n not in apart}, same)


ATTRIBUTES = _attributes(attributes_of, lambda value, content: same_entries(attributes_of(value), content))
MODULE, LIGHTNING_MODULE = _module_attributes(_PARTS), _module_attributes(_OF_LIGHTNING)
METRIC = _attributes(beside_states, lambda metric, content: same_entries(beside_states(metric), content))
MODULES = (MODULE, LIGHTNING_MODULE)
NAMED = (ATTRIBUTES, METRIC, *MODULES)
"""Kinds of objects whose changes are :class:`Bound`."""


def means_the_same(found: Object) -> bool:
    """Whether attributes were only bound to other objects with the same contents, as caches are."""
    change = found.change()
    if not isinstance(change, Bound) or change.gone:
        return False
    return all(is_equal(value, found.content.get(name, found)) for name, value in change.values.items())


_SLOTS: dict[type, tuple[str, ...]] = {}


def slots_of(kind: type) -> tuple[str, ...]:
    """The slots of a class, by the names under which objects have them: private ones are called ``_Class__name``."""
    if kind not in _SLOTS:
        slotted = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
        _SLOTS[kind] = tuple(n for own in slotted for n, m in own.items() if isinstance(m, MemberDescriptorType))
    return _SLOTS[kind]


# ---- which objects are looked at, and how

_OTHERS = (
    Trainer, SingleDeviceStrategy, Callback, LightningDataModule, Logger, ModuleType, FunctionType, BuiltinFunctionType,
    type,
)  # fmt: skip
"""What a module refers to and does not own."""

_OF_TORCH = (Optimizer, LRScheduler, GradScaler, Dataset, DataLoader, Sampler)
"""What of torch is looked into like people's own objects."""

_LIBRARIES = frozenset(
    ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics",
     "fl_lightning", "weakref", "logging", "re", "functools", "_thread", "threading")
)  # fmt: skip
"""Other objects of theirs are looked into only if they are modules, tensors, generators or containers."""

_SYSTEM = frozenset(
    ("io", "_io", "socket", "multiprocessing", "concurrent", "asyncio", "subprocess", "sqlite3", "mmap", "_queue")
)
"""Their objects stand for something outside the process's own memory, or hide what they hold."""

_LARGE = 2**20  # bytes of an array, and tenfold items of a list, that are constant if only a data set leads to them


def kinds_of(value: Any, of_data: bool = False) -> tuple[Kind, ...] | None:
    """How an object is looked at: not at all, or by what it holds, by its attributes, or both; ``None``: it cannot be.

    ``of_data`` says that only a data set leads to it.
    """
    if isinstance(value, _OTHERS):
        return ()
    if isinstance(value, Tensor):
        # A tensor with a graph is a result. Nobody writes into it, nor into one of inference mode in training.
        result = value.grad_fn is not None or (value.is_inference() and not torch.is_inference_mode_enabled())
        return () if result or value.is_meta or value.is_quantized else (OF_DATA if of_data else NUMBERS,)
    home = type(value).__module__.partition(".")[0]
    followed = home not in _LIBRARIES or isinstance(value, _OF_TORCH)
    attributes = (ATTRIBUTES,) if followed and hasattr(value, "__dict__") else ()
    if isinstance(value, (list, deque, dict, set)):
        return (OF_DATA if of_data and len(value) > _LARGE // 100 else ITEMS, *attributes)
    if isinstance(value, np.ndarray):
        constant = not value.flags.writeable or (of_data and value.nbytes > _LARGE)
        return attributes if constant else (ARRAY, *attributes)
    for types, kind in ((GENERATORS, GENERATOR), ((bytearray, array), BYTES)):
        if isinstance(value, types):
            return (kind, *attributes)
    if isinstance(value, nn.Module):
        return (ATTRIBUTES,)
    if hasattr(value, "__next__") or home in _SYSTEM:
        return None
    return attributes or ((ATTRIBUTES,) if followed and slots_of(type(value)) else ())
