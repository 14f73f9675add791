# SPDX-License-Identifier: Apache-2.0
"""All that a module keeps beside its parameters, as it was at a moment, to be put back and carried on.

It is found from the attributes of the module and its submodules on: containers, tensors, arrays, generators, and
objects of people's own. What changed inside comes back inside, so that all who hold an object see the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.core.modules import buffers_of, modes_kept, named_metrics, outside_metrics, submodules
from fl_lightning.lightning.metric_state import MetricState, is_mergeable, joins_clients, parts_of
from fl_lightning.lightning.module.contents import PLAIN, held_by
from fl_lightning.lightning.module.kept_objects import (
    Kept,
    Names,
    Numbers,
    _Bindings,
    _MetricNames,
    kinds_of,
    same_entries,
)
from fl_lightning.lightning.names import LightningModule

_OF_TORCH = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
"""What belongs to parameters and buffers."""

_OF_LIGHTNING = _OF_TORCH | {
    "_trainer", "_fabric", "_current_fx_name", "_metric_attributes", "log", "log_dict", "federated_features",
}  # fmt: skip
"""What is another at every moment, too."""

FRAMEWORK = frozenset((*vars(nn.Module()), *vars(LightningModule()), "_hparams_initial"))
"""Attributes of modules that belong to torch and Lightning."""


def is_reserved(module: nn.Module, name: str) -> bool:
    """Whether an attribute belongs to torch or Lightning, or is a parameter, a buffer or a submodule."""
    return any(name in part for part in (FRAMEWORK, module._parameters, module._buffers, module._modules))


_HOOKS = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict)) - _OF_TORCH
_MANY = 100_000
"""Objects of one module that are looked after; what is found beyond these is left alone."""


class ObjectState:
    """What the plain attributes of a module and its submodules held when this was made.

    Parameters, buffers, submodules, the trainer, callbacks, data sets and metrics are not among them. Metrics that it
    ``joins`` have states that others see to; what they hold beside these is kept here.
    """

    def __init__(self, module: nn.Module, joins: Callable[[Metric], bool] = joins_clients) -> None:
        self._module, self._joins = module, joins
        self.kept: list[Kept] = []  # all that may change, in an order that is the same in copies of the module
        self.metrics: dict[str, Metric] = dict(named_metrics(module))  # those outside its submodules included
        self.alone: dict[str, str] = {}  # kinds of attributes that cannot be put back, iterators and open files
        self.tensors: list[tuple[str, Tensor]] = []  # in attributes
        parts = submodules(module)
        self._structure = [(part, list(part._modules.values())) for _, part in parts]
        self.own: list[Any] = []
        for _, part in parts:
            self.own += [part, *part._parameters.values(), *part._buffers.values()]
        self._seen = set(map(id, self.own))
        waiting = deque[tuple[Any, str]]()
        named = [(prefix, part) for prefix, part in outside_metrics(parts) if not isinstance(part, MetricCollection)]
        for prefix, part in named:
            self._keep(PartNames(part, prefix), waiting)
        hooks = {f"{at}.{n}" if at else n: vars(part).get(n, {}) for at, part in named for n in _HOOKS}
        self._hooks = _Hooks(hooks, "")
        waiting.extend(self._hooks.parts())
        for prefix, metric in self.metrics.items():
            self._keep_beside(metric, prefix, waiting)
        self._look_into(waiting)

    def _look_into(self, waiting: deque[tuple[Any, str]]) -> None:
        while waiting:
            self._look_at(*waiting.popleft(), waiting)

    def _keep(self, kept: Kept, waiting: deque[tuple[Any, str]]) -> None:
        self.kept.append(kept)
        waiting.extend((value, name) for value, name in kept.parts() if not isinstance(value, PLAIN))

    def _keep_beside(self, metric: Metric, name: str, waiting: deque[tuple[Any, str]]) -> None:
        for at, part in parts_of(metric) if self._joins(metric) else ():
            self._keep(_MetricNames(part, f"{name}.{at}" if at else name), waiting)

    def _look_at(self, value: Any, name: str, waiting: deque[tuple[Any, str]]) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        inside = held_by(value)
        if inside is not None:
            waiting.extend((part, name) for part in inside if not isinstance(part, PLAIN))
            return
        if isinstance(value, Tensor):
            self.tensors.append((name, value))
        if isinstance(value, Metric):
            self.metrics[f"{len(self.metrics)} in {name}"] = value
            self._keep_beside(value, name, waiting)
        kinds = kinds_of(value) if len(self.kept) < _MANY else None
        if kinds is None:
            self.alone.setdefault(name, type(value).__name__)
        for kind in kinds or ():
            self._keep(kind(value, name), waiting)

    @property
    def known(self) -> list[Any]:
        """All that copies of the module have at the same places: what belongs to it, and what is kept."""
        kept = [*self.kept, self._hooks]
        return [*self.own, *self.metrics.values(), *kept, *(one.value for one in kept)]

    def current(self) -> ObjectState:
        """The state of the module now: this one, if nothing has changed."""
        same = all(
            len(part._modules) == len(children) and all(map(is_, part._modules.values(), children))
            for part, children in self._structure
        )
        return self if same and not self.changed() else ObjectState(self._module, self._joins)

    def changed(self) -> list[Kept]:
        """The objects that hold something else now."""
        return [kept for kept in (*self.kept, self._hooks) if not kept.is_same()]

    def put_back(self) -> None:
        """Lets all objects hold what they held."""
        for kept in self.changed():
            kept.put(kept.content)


class PartNames(Names):
    """Attributes of a submodule, apart from what torch, Lightning and this package keep in it for themselves."""

    def __init__(self, value: Any, name: str) -> None:
        self.value, self.name = value, name
        self._apart = _OF_LIGHTNING if isinstance(value, LightningModule) else _OF_TORCH
        self.content = self.now()

    def now(self) -> dict[str, Any]:
        """See :meth:`Kept.now`."""
        return {name: value for name, value in vars(self.value).items() if name not in self._apart}

    def is_same(self) -> bool:
        """See :meth:`Kept.is_same`; called for every submodule before and after every visit."""
        own, content = vars(self.value), self.content
        if not all(map(is_, map(own.get, content), content.values())):
            return False
        return bool(len(own) == len(content) + sum(map(own.__contains__, self._apart)))

    def changed_names(self) -> list[str]:
        """See :meth:`Kept.changed_names`."""
        bound, gone = self.change()
        return [f"{self.name}.{name}" if self.name else name for name in (*bound, *gone)]

    def parts(self) -> Iterable[tuple[Any, str]]:
        """See :meth:`Kept.parts`; nobody changes what torch and Lightning have there, and hooks are kept apart."""
        at = f"{self.name}." if self.name else ""
        return [(value, at + name) for name, value in self.content.items() if name not in FRAMEWORK]


class _Hooks(Kept):
    """What is to run around submodules, by attribute: many dictionaries of torch's, mostly empty ones."""

    value: dict[str, dict[Any, Any]]

    def now(self) -> dict[str, dict[Any, Any]]:
        return {name: dict(hooks) for name, hooks in self.value.items() if hooks}

    def is_same(self) -> bool:
        return not (self.changed_names() if self.content else any(self.value.values()))

    def put(self, content: dict[str, dict[Any, Any]]) -> None:
        for name, hooks in self.value.items():
            hooks.clear()
            hooks.update(content.get(name, {}))

    def changed_names(self) -> list[str]:
        return [n for n, hooks in self.value.items() if not same_entries(hooks, self.content.get(n, {}))]

    def parts(self) -> Iterable[tuple[Any, str]]:
        return [(hook, name) for name, hooks in self.content.items() for hook in hooks.values()]


class WholeState(ObjectState):
    """What a module held when this was made: attributes, buffers, submodules and metrics.

    Of a metric whose states can be joined, the states are remembered. Of any other, all that it holds.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, is_mergeable)
        waiting = deque[tuple[Any, str]]()
        parts = outside_metrics(submodules(module))
        named = [(f"{prefix}." if prefix else "", part) for prefix, part in parts]
        self._keep(_Bindings([(at, part._buffers) for at, part in named], ""), waiting)
        for _, _, name, buffer in chain(*buffers_of(module)):
            for kind in kinds_of(buffer) or ():
                self._keep(kind(buffer, name), waiting)
        self.attributes = list(self.kept)  # and buffers, those of metrics that cannot be joined left out
        self._keep(_Bindings([(at, part._modules) for at, part in named], ""), waiting)
        wrappers = [(n.rpartition(" in ")[2], metric) for n, metric in self.metrics.items() if not is_mergeable(metric)]
        inside = [(name, part) for name, metric in wrappers for _, part in submodules(metric)]
        self._seen.update(id(own) for _, part in inside for own in (part, *part._parameters.values()))
        for name, part in inside:
            self._keep(Names(part, name), waiting)
            own = part._buffers.values() if isinstance(part, Metric) else ()
            for buffer in [buffer for buffer in own if buffer is not None]:
                self._keep(Numbers(buffer, name), waiting)
        self._look_into(waiting)
        # What collections know of their metrics comes back only where it was not the evaluation itself that changed it.
        whole = len(self.kept)
        for prefix, part in parts:
            if isinstance(part, MetricCollection):
                self._keep(PartNames(part, prefix), waiting)
        self._look_into(waiting)
        self._collections, self.kept = self.kept[whole:], self.kept[:whole]
        self.states = [MetricState(metric) for metric in self.metrics.values() if is_mergeable(metric)]

    def changed_attributes(self) -> list[Kept]:
        """Those of :attr:`attributes` that hold something else now."""
        return [kept for kept in self.attributes if not kept.is_same()]

    def put(self) -> None:
        """Puts everything back."""
        for kept in (*self.changed(), *self._collections):
            kept.put(kept.content)
        for state in self.states:
            state.put_back()

    def empty_metrics(self) -> None:
        """Lets all metrics start from zero."""
        for metric in self.metrics.values():
            metric.reset()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What the module holds now comes back in the end."""
        later = [(kept, kept.now()) for kept in (*self.changed(), *self._collections)]
        states = [MetricState(state.metric) for state in self.states]
        try:
            yield
        finally:
            self.put_back()
            for kept, content in later:
                kept.put(content)
            for state in states:
                state.put_back()


@contextmanager
def shadowed(owner: object, **values: Any) -> Iterator[None]:
    """Puts other values in front of attributes and methods of an object, and takes them away in the end."""
    attributes = vars(owner)  # nn.Module's own way of setting one would register submodules and tensors
    hidden = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(hidden)


class Undone:
    """Runs a module without a trace in its attributes and metrics, and without a word to its loggers."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._state: ObjectState | None = None

    @contextmanager
    def __call__(self, evaluate: bool = True) -> Iterator[None]:
        """Metrics are empty, ``self.log`` does nothing, and everything comes back in the end."""
        module = self._module
        state = self._state = ObjectState(module) if self._state is None else self._state.current()
        parts = [part for metric in state.metrics.values() for _, part in submodules(metric)]
        metrics = [MetricState(part) for part in parts if isinstance(part, Metric)]
        for metric in metrics:
            metric.metric.reset()
        try:
            with shadowed(module, log=_ignore, log_dict=_ignore), modes_kept(submodules(module)):
                if evaluate:
                    module.eval()
                yield
        finally:
            state.put_back()
            for metric in metrics:
                metric.put_back()


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None
