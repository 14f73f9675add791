# SPDX-License-Identifier: Apache-2.0
"""Plans: a loss and its gradients, computed once with every ATen call noted, as a function in memory that stays.

Calls that have a variant with ``out=`` write into tensors that are allocated once, and views of such tensors are made
once. All other calls are made as they were recorded, so results have the same bits. A plan takes the place of a graph
that TorchDynamo has found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_QUICK = {
    _ATEN.add.out: torch.add, _ATEN.addmm.out: torch.addmm, _ATEN.clamp_min.out: torch.clamp_min,
    _ATEN.mm.out: torch.mm, _ATEN.mul.out: torch.mul, _ATEN.sum.IntList_out: torch.sum, _ATEN.t.default: torch.t,
}  # fmt: skip
"""Frequent operations by the function that calls them fastest: no arguments are looked up in a schema."""


class CannotPlanError(Exception):
    """A step that cannot be repeated from a recording; the message completes "eager, because ..."."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Any] = []  # operations, what went in and what came out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATEN.lift_fresh.default:
            func = _ATEN.clone.default  # a number becomes a tensor, a new one in every run
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class Plan:
    """Computes a loss and its gradients from the inputs of the graph, with PyTorch's bits or not at all."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
        for node in graph.graph.nodes:
            # Such a tensor decides about the dtype of a result; a number does not.
            if node.op == "placeholder" and getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", True):
                raise CannotPlanError("TorchDynamo would make a tensor of a number or an array of NumPy")
        own = {id(parameter) for parameter in parameters}
        for value in inputs:
            if type(value) not in (Tensor, nn.Parameter) or value.device.type != "cpu":
                raise CannotPlanError(f"it computes with a {type(value).__name__} from outside")
            if value.requires_grad and id(value) not in own:
                raise CannotPlanError("it needs the gradient of a tensor that no optimizer holds")
        self._graph, self._no_grad = graph, torch.no_grad()
        places = {id(value): place for place, value in enumerate(inputs)}
        self._wanted = [places.get(id(parameter)) for parameter in parameters]
        self._program = program_of(graph, inputs, self._wanted)
        self.gradients: Sequence[Tensor | None] = ()  # of the last call, one per parameter
        self.last: Sequence[Tensor] | None = inputs  # of the last call; None once it was compared
        self.compare()

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """What the graph returns, without its own graph."""
        self.last = inputs
        with self._no_grad:
            returned, self.gradients = self._program(*inputs)
        return returned  # type: ignore[no-any-return]

    def compare(self) -> None:
        """Computes the last call by the program and by PyTorch, which must agree; changes nothing."""
        inputs, self.last = self.last or (), None
        before, state = [tensor.detach().clone() for tensor in inputs], torch.get_rng_state()
        with torch.no_grad():
            returned, gradients = self._program(*inputs)
        ours = [t if t is None else t.detach().clone() for t in (*returned, *gradients, *inputs, torch.get_rng_state())]
        _put_back(inputs, before, state)
        returned, found = with_gradients(self._graph, inputs)
        same = all(map(_same_bits, ours, (*returned, *map(found.get, self._wanted), *inputs, torch.get_rng_state())))
        _put_back(inputs, before, state)
        if not same:
            raise CannotPlanError("what a plan computes would differ from PyTorch's bits")


def program_of(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], wanted: Sequence[int | None]
) -> Callable[..., Any]:
    """Runs a function and the backward pass of its loss on copies; the random generator stays where it is.

    Returns a function of the inputs, to be called without autograd, that gives what was returned, in new memory, and
    the gradients by the inputs at the places wanted; ``None`` has none.
    """
    copies = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t.detach()) for t in inputs]
    for copy, tensor in zip(copies, inputs, strict=True):
        copy.requires_grad_(tensor.requires_grad)
    with torch.random.fork_rng(devices=()), _Recorder() as recorder:
        returned, gradients = with_gradients(function, copies)
    writer = _Writer(copies, set(map(_memory, returned)))
    for call in recorder.calls:
        writer.add(*call)
    return writer.function(returned, [gradients.get(place) for place in wanted])


def with_gradients(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
) -> tuple[list[Tensor], dict[int | None, Tensor]]:
    """What a function returns, without its graph, and the gradients of its loss by place of their input."""
    returned = list(function(*inputs))
    losses = [tensor for tensor in returned if tensor.requires_grad]
    if len(losses) != 1:
        raise CannotPlanError("it keeps tensors with their graphs" if losses else "its loss has no gradients")
    places = [place for place, tensor in enumerate(inputs) if tensor.requires_grad]
    found = torch.autograd.grad(losses[0], [inputs[place] for place in places], allow_unused=True)
    gradients: dict[int | None, Tensor] = {p: g for p, g in zip(places, found, strict=True) if g is not None}
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in returned], gradients


class _Writer:
    """Source text of the function: ``i0`` is an input, ``r1`` a result of the run, ``v2`` a value that stays."""

    def __init__(self, inputs: Sequence[Tensor], fresh: set[int]) -> None:
        self._head = f"def run({', '.join(f'i{place}' for place in range(len(inputs)))}):"
        self._lines: list[str] = []
        self._names = {id(tensor): f"i{place}" for place, tensor in enumerate(inputs)}
        self._values: dict[str, Any] = {}
        self._stays: dict[int, Tensor] = {}  # what takes the place of a recorded tensor in every run
        self._fresh, self._known, self._made = fresh, set[int](), set[int]()  # memory: new in every run; met; written

    def add(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        _check(op, args)
        taken, results = _tensors((args, kwargs)), _tensors(result)
        self._known.update(map(_memory, taken))
        memory = set(map(_memory, results))
        changes, shown = op._schema.is_mutable, memory & self._known
        found = None if changes or memory & self._fresh else _with_out(op)
        if op in (_ATEN.alias.default, _ATEN.detach.default):  # a view of all, and nobody asks here for a graph
            self._names[id(result)] = self._text(taken[0])
            self._stays |= {id(result): self._stays[id(tensor)] for tensor in taken if id(tensor) in self._stays}
        elif results and shown == memory and not changes and all(id(tensor) in self._stays for tensor in taken):
            made = op(*(self._stays.get(id(value), value) for value in args), **kwargs)
            self._stays.update(zip(map(id, results), _tensors(made), strict=True))
        elif found is not None:
            op, names, more = found
            buffers = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in results]
            self._call("", op, (*args, *more), {**kwargs, **dict(zip(names, buffers, strict=True))})
            self._stays.update(zip(map(id, results), buffers, strict=True))
        else:
            self._call(f"{self._new(result)} = ", op, args, kwargs)
        self._made |= memory - self._known
        self._known |= memory

    def _new(self, result: Any) -> str:
        if isinstance(result, (list, tuple)):
            return "".join(f"{self._new(part)}, " for part in result)
        if not isinstance(result, Tensor) or {id(result)} & {*self._names, *self._stays}:  # it was changed in place
            return "_"
        return self._names.setdefault(id(result), f"r{len(self._names)}")

    def _call(self, target: str, op: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        given = [*map(self._text, args), *(f"{name}={self._text(value)}" for name, value in kwargs.items())]
        self._lines.append(f"    {target}{self._text(_QUICK.get(op) or op._op)}({', '.join(given)})")

    def _text(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            parts = "".join(f"{self._text(part)}, " for part in value)
            return f"[{parts}]" if isinstance(value, list) else f"({parts})"
        if value is None or type(value) in (bool, int):
            return repr(value)
        value = self._stays.get(id(value), value)
        if id(value) not in self._names:
            self._names[id(value)] = f"v{len(self._names)}"
            self._values[self._names[id(value)]] = value
        return self._names[id(value)]

    def function(self, returned: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Callable[..., Any]:
        """The function. Every gradient has memory of its own: client rules and clipping change it in place."""
        shared, found = Counter(_memory(g) for g in gradients if g is not None), list[str]()
        for g in gradients:
            alone = g is None or (shared[_memory(g)] == 1 and _memory(g) in self._made and g.is_contiguous())
            rows = "" if alone else f".clone(memory_format={self._text(torch.contiguous_format)})"
            found.append(self._text(g) + rows)
        lines = [self._head, *self._lines, f"    return {self._text(tuple(returned))}, [{', '.join(found)}]"]
        exec(compile("\n".join(lines), "<planned step>", "exec"), self._values)
        return self._values["run"]  # type: ignore[no-any-return]


def _check(op: Any, args: tuple[Any, ...]) -> None:
    if not hasattr(op, "_schema"):
        raise CannotPlanError(f"it calls {getattr(op, '__name__', op)}, which is no ATen operation")
    name = op.overloadpacket.__name__
    if torch.Tag.inplace_view in op.tags or name in ("set_data", "shallow_copy_data_"):
        raise CannotPlanError(f"it calls {name}, which moves a tensor in memory")
    of_values = torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags
    if op is _ATEN.index.Tensor:  # masks pick as many as they like, indices do not
        of_values = any(index is not None and index.dtype is not torch.int64 for index in args[1])
    if of_values:
        raise CannotPlanError(f"it calls {name}, whose result depends on the values of tensors")


def _memory(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; an empty tensor shares none."""
    if tensor.layout != torch.strided:
        raise CannotPlanError(f"it computes with a sparse tensor ({tensor.layout})")
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _with_out(op: Any) -> tuple[Any, tuple[str, ...], tuple[Any, ...]] | None:
    """An operation's own variant that writes into memory at hand, the names of that memory, and further arguments."""
    if op is _ATEN.relu.default:
        return _ATEN.clamp_min.out, ("out",), (0,)  # relu's own variant computes elsewhere and copies
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    for name in op.overloadpacket.overloads():
        variant = getattr(op.overloadpacket, name)
        arguments = variant._schema.arguments
        outs = tuple(a.name for a in arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write)
        rest = [(a.name, str(a.type)) for a in arguments if a.name not in outs]
        # Generated variants compute elsewhere and copy, too.
        if outs and len(outs) == len(op._schema.returns) and rest == wanted and torch.Tag.generated not in variant.tags:
            return variant, outs, ()
    return None


def _put_back(tensors: Sequence[Tensor], before: Sequence[Tensor], state: Tensor) -> None:
    for tensor, old in zip(tensors, before, strict=True):
        if not _same_bits(tensor, old):  # what is read alone must not look as if it had been written
            tensor.detach().copy_(old)
    torch.set_rng_state(state)


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return a is b
    return torch.equal(*(tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (a, b)))
