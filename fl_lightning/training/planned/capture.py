# SPDX-License-Identifier: Apache-2.0
"""A Python function under TorchDynamo's guards: what it reads is checked at every call, what it changes is refused.

This file alone touches private parts of TorchDynamo. A release of PyTorch that lacks them gives a
:class:`~fl_lightning.training.planned.trace.CannotPlanError`, and local steps are taken without a plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakMethod, finalize

import torch
from torch import Tensor, fx, nn

from fl_lightning.training.planned.trace import CannotPlanError, begin_autograd


@dataclass(frozen=True)
class Captured:
    """The tensor operations of one call.

    Attributes:
        function: takes the inputs; gives the tensors that the call returns or records.
        inputs: those of this call: plain tensors and parameters.
        from_batch: places of inputs that are parts of the batch.
    """

    function: Callable[..., Sequence[Tensor]]
    inputs: tuple[Tensor, ...]
    from_batch: frozenset[int]


Replacement = Callable[..., Sequence[Tensor]]
"""Takes the inputs of a captured function and gives what it gives."""


def guarded(
    function: Callable[..., Any], batch: str, records: str, build: Callable[[Captured], Replacement]
) -> Callable[..., Any]:
    """Puts something in the place of the tensor operations of a function, for as long as its Python does the same.

    Every call checks whether all that Python has read is as it was at a capture: attributes, global variables, numbers,
    shapes of tensors. If so, the replacement runs. If not, the call is captured anew.

    Args:
        function: what to call, without free variables and with positional arguments alone.
        batch: name of the argument whose tensors are others in every call.
        records: name of the argument that holds a list. The function may write into it. A function
            that changes anything else that outlives the call is refused.
        build: a method that makes the replacement. Its object is not kept, because TorchDynamo keeps every backend for
            ever: who calls the function has to keep it.

    Returns:
        The function. Its calls raise what TorchDynamo raises for a function that it cannot capture as a whole, and
        :class:`CannotPlanError`, perhaps as a cause.
    """
    held = WeakMethod(build)

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Replacement:
        make = held()
        assert make is not None
        return make(_captured(module, inputs, batch, records))

    assert isinstance(function, FunctionType)
    begin_autograd()
    # TorchDynamo keeps what it has captured by code object, which two fits in one process must not share.
    code = function.__code__.replace(co_filename=function.__code__.co_filename)
    own = FunctionType(code, function.__globals__, function.__name__)
    found = _Guarded(own, torch.compile(own, backend=backend, fullgraph=True, dynamic=False))
    finalize(found, _forget, code).atexit = False
    return found


def _forget(code: CodeType) -> None:
    """Lets TorchDynamo forget what it has captured, which it would keep for ever: tensors that were computed into."""
    with suppress(ImportError):
        from torch._dynamo.eval_frame import remove_from_cache

        remove_from_cache(code)


class _Guarded:
    """Checks the guards of what was captured before, without the rest that TorchDynamo does at a call: a third of it.

    Args:
        function: the function, without free variables.
        compiled: the same for TorchDynamo, which captures anew what no guards let through.
    """

    def __init__(self, function: FunctionType, compiled: Callable[..., Any]) -> None:
        self._function, self._compiled = function, compiled
        self._names = function.__code__.co_varnames[: function.__code__.co_argcount]
        self._known: list[tuple[Any, Callable[..., Any]]] = []

    def __call__(self, *args: Any) -> Any:
        values = dict(zip(self._names, args, strict=True))
        for guards, replaced in self._known:
            if guards.cache_entry is not None and guards.check(values):  # without an entry, it was declared invalid
                return replaced(*args)
        result = self._compiled(*args)
        self._known = _captures(self._function)
        return result


def _captures(function: FunctionType) -> list[tuple[Any, Callable[..., Any]]]:
    """What TorchDynamo has captured of a function: guards, and what runs if they hold."""
    try:
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

        found = [(entry.guard_manager, entry.code) for entry in _debug_get_cache_entry_list(function.__code__)]
        if any(guards.cache_entry is None for guards, _ in found):
            return []
    except (ImportError, AttributeError):
        return []
    # TorchDynamo wraps what it calls so that it is not captured itself; nothing captures here.
    names = {name: getattr(value, "_torchdynamo_orig_callable", value) for name, value in function.__globals__.items()}
    return [(guards, FunctionType(code, names, function.__name__)) for guards, code in found]


def _captured(module: fx.GraphModule, inputs: Sequence[Any], batch: str, records: str) -> Captured:
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        output = InstructionTranslator.current_tx().output
        effects = output.side_effects
        changed = [
            what for what in effects._get_modified_vars() if type(what.mutation_type).__name__.endswith("Existing")
        ]
        drawn, remembers, unseen = bool(output.random_calls), _remembering(output), _unseen(output)
        sources = [node.meta["grapharg"].source for node in module.graph.nodes if node.op == "placeholder"]
    except (ImportError, AttributeError, KeyError) as error:
        raise CannotPlanError(
            f"PyTorch {torch.__version__} does not show what a step reads and changes ({error})"
        ) from error
    if drawn:
        raise CannotPlanError("it draws numbers from Python's random")
    if remembers is not None:
        raise CannotPlanError(f"it calls {remembers}, which remembers what it gave (functools.lru_cache)")
    if unseen is not None:
        raise CannotPlanError(f"it reads {unseen}, which TorchDynamo does not check")
    for what in changed:
        if _root(what.source) != records:
            raise CannotPlanError(f"it changes {_name(what, effects)}")
    if any(node.op == "call_method" and node.target in ("item", "tolist") for node in module.graph.nodes):
        raise CannotPlanError("it takes numbers out of tensors")
    for value in inputs:
        if type(value) not in (Tensor, nn.Parameter):
            raise CannotPlanError(f"it computes with a {type(value).__name__} from outside")
        if value.device.type != "cpu" or value.layout != torch.strided:
            raise CannotPlanError(f"it computes with a tensor on {value.device}, {value.layout}")
    if any(getattr(source, "member", None) == "grad" for source in sources):
        raise CannotPlanError("it reads gradients, which a plan computes into the same memory")
    from_batch = frozenset(place for place, source in enumerate(sources) if _root(source) == batch)
    return Captured(module, tuple(inputs), from_batch)


def _remembering(output: Any) -> str | None:
    """The name of a function that keeps what it once gave: TorchDynamo calls what such a function wraps.

    Functions of PyTorch and einops keep what depends on their arguments alone.
    """
    scope = {"L": output.local_scope, "G": output.global_scope}
    for guard in output.guards:
        source = guard.originating_source
        if getattr(source, "member", None) == "__wrapped__":
            wrapped = eval(_path(source), scope)
            if wrapped.__module__.partition(".")[0] not in ("torch", "einops"):
                return str(wrapped.__qualname__)
    return None


def _unseen(output: Any) -> str | None:
    """What may change without a guard that fails, in words.

    TorchDynamo compares a tuple of numbers as a whole. If there is a list in it, that list is compared with itself. Of
    environment variables those alone are checked that ``os.environ[...]`` finds.
    """
    scope = {"L": output.local_scope, "G": output.global_scope}
    for guard in output.guards:
        path = _path(guard.originating_source)
        value: object = None
        with suppress(Exception):  # sources that are no plain expressions lead to nothing of the kind
            value = eval(path, scope) if path else None
        if value is os.getenv or value is os.environ:
            return "an environment variable"
        whole = type(value) is tuple and guard.create_fn_name() in ("CONSTANT_MATCH", "EQUALS_MATCH")
        if whole and _may_change(value):
            return f"a list or set in a tuple ({path.rpartition('.')[2]})"
    return None


def _may_change(value: object) -> bool:
    return isinstance(value, (list, set)) or (isinstance(value, tuple) and any(map(_may_change, value)))


def _path(source: Any) -> str:
    """An expression for what was read: TorchDynamo calls local variables ``L``, and global ones ``G``."""
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def _root(source: Any) -> str:
    """The local variable that a value was read from."""
    while getattr(source, "base", None) is not None:
        source = source.base
    return str(getattr(source, "local_name", ""))


def _name(what: Any, effects: Any) -> str:
    """A changed object in words."""
    attributes = list(getattr(effects, "store_attr_mutations", {}).get(what, ()))
    kind = type(getattr(what, "value", what)).__name__
    with suppress(Exception):  # an older PyTorch does not know it of all objects
        kind = str(what.python_type_name())
    if attributes:
        return f"attribute {attributes[0]!r} of a {kind}"
    path = _path(what.source).rpartition(".")[2].strip("'\"[]")
    return f"a {kind}{f' ({path})' if path else ''}"
