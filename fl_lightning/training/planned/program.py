# SPDX-License-Identifier: Apache-2.0
"""A trace that runs in memory that stays: every call writes its result where it wrote it the last time.

Calls that have a variant with ``out=`` write into tensors that are allocated once. Views of such tensors are made once.
What is left is done as in the trace, so the results have the same bits as without a program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from fl_lightning.training.planned.trace import CannotPlanError, Trace, written_arguments

_ATEN = torch.ops.aten

_SAME: dict[object, tuple[OpOverload, tuple[Any, ...]]] = {_ATEN.relu.default: (_ATEN.clamp_min.out, (0,))}
"""Operations whose own ``out`` variant computes elsewhere and copies: one that computes the same, and its arguments."""

_UNFILLED = {"empty", "empty_like", "new_empty", "empty_strided"}
"""Operations whose result may hold anything."""

_FILLED = {
    "ones_like",
    "zeros_like",
    "full_like",
    "ones",
    "zeros",
    "full",
    "new_zeros",
    "new_ones",
    "new_full",
    "arange",
}
"""Operations whose result depends on no tensor's values."""


_MOVING = {"resize_", "resize_as_", "set_", "set_data", "shallow_copy_data_"}
"""Operations in place that move a tensor to other memory: those of an assignment to ``tensor.data``, too."""

_ITSELF = {_ATEN.alias.default, _ATEN.detach.default}
"""Views of all of a tensor: nobody asks here whether a tensor has a graph."""


@dataclass(frozen=True)
class Register:
    """A result that is made anew in every run.

    Attributes:
        number: one for each.
        like: the result at the trace, without its values.
    """

    number: int
    like: Any = field(compare=False, repr=False, default=None)


Value: TypeAlias = "Tensor | Register | tuple[Value, ...] | None"


@dataclass(frozen=True)
class Call:
    """One call of a run.

    Attributes:
        op: what is called.
        args: tensors that stay, registers, or other values.
        kwargs: the same by name.
        results: registers of what it returns; none if that stays.
        forgets: registers that nothing reads any more.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Register, ...]
    forgets: tuple[Register, ...] = ()


@dataclass(frozen=True)
class Program:
    """Calls that repeat a trace.

    Attributes:
        arguments: the inputs that a run is given.
        calls: in their order.
        returned: what the traced function returns; never memory that the next run writes into.
        gradients: of the trace's :attr:`Trace.trained`.
    """

    arguments: tuple[Register, ...]
    calls: tuple[Call, ...]
    returned: tuple[Value, ...]
    gradients: tuple[Value, ...]


def program_of(
    trace: Trace, inputs: Sequence[Tensor], given: frozenset[int] = frozenset(), fresh_gradients: bool = False
) -> Program:
    """Allocates memory for a trace on inputs that stay where they are.

    Args:
        trace: what to repeat.
        inputs: as those of the trace; a run reads them and, as the trace does, writes into them.
        given: places of inputs that every run gets anew, of the same shapes: how memory is aligned may decide about the
            last bits of a matrix product, so batches are not copied.
        fresh_gradients: make gradients anew in every run, for somebody who keeps them.

    Raises:
        CannotPlanError: a call is of a kind that a program cannot repeat.
    """
    return _Writer(trace, [tensor.detach() for tensor in inputs], given, fresh_gradients).program()


class _Writer:
    """Goes through a trace once.

    Args:
        trace: what to repeat.
        inputs: without gradients.
        given: see :func:`program_of`.
        fresh_gradients: see there.
    """

    def __init__(self, trace: Trace, inputs: Sequence[Tensor], given: frozenset[int], fresh_gradients: bool) -> None:
        self._trace, self._inputs, self._given = trace, inputs, given
        self._placeholders, self._arguments = 0, list[Register]()
        self._nodes = list(trace.graph.nodes)
        self._values: dict[fx.Node, Value] = {}
        self._calls: list[Call] = []
        self._registers = 0
        self._outputs: list[fx.Node] = list(self._nodes[-1].args[0])
        returned, gradients = self._outputs[: trace.returns], self._outputs[trace.returns :]
        self._fresh = {trace.base(node) for node in (self._outputs if fresh_gradients else returned)}
        self._kept = {trace.base(node) for node in gradients}
        self._last_use = self._last_uses()
        self._idle: dict[tuple[Any, ...], list[tuple[int, Tensor]]] = {}
        self._made: set[fx.Node] = set()  # single tensors that every run writes
        self._constant: set[fx.Node] = set()  # tensors that no run writes

    def _last_uses(self) -> dict[fx.Node, int]:
        """Of every base, the place of the last node that reads it."""
        last: dict[fx.Node, int] = {}
        for place, node in enumerate(self._nodes):
            for source in (node, *node.all_input_nodes):
                last[self._trace.base(source)] = place
        return last

    def program(self) -> Program:
        """Writes the program."""
        for place, node in enumerate(self._nodes[:-1]):
            self._values[node] = self._value(node, place)
        returned = tuple(self._values[node] for node in self._outputs[: self._trace.returns])
        gradients = tuple(map(self._gradient, self._outputs[self._trace.returns :]))
        calls = _forgetting(self._calls, (*returned, *gradients))
        return Program(tuple(self._arguments), calls, returned, gradients)

    def _gradient(self, node: fx.Node) -> Value:
        """A gradient in memory of its own, which every run writes anew, in a layout as its parameter has it.

        Client rules and clipping change gradients in place.
        """
        value, memory = self._values[node], self._memory(node)
        assert isinstance(value, (Tensor, Register))
        sharing = [other for other in self._outputs[self._trace.returns :] if self._memory(other) == memory]
        shown = value if isinstance(value, Tensor) else value.like
        if shown.is_contiguous() and len(sharing) == 1 and self._is_anew(self._trace.base(node)):
            return value
        if isinstance(value, Register):
            copied = self._register(shown)
            self._calls.append(
                Call(_ATEN.clone.default, (value,), {"memory_format": torch.contiguous_format}, (copied,))
            )
            return copied
        own = torch.empty(value.shape, dtype=value.dtype)
        self._calls.append(Call(_ATEN.copy_.default, (own, value), {}, ()))
        return own

    def _memory(self, node: fx.Node) -> tuple[fx.Node, object]:
        """What made the memory that a tensor shows, and which of its results it was."""
        base, place = self._trace.base(node), None
        while node is not base:
            source = self._trace.sources[node]
            if source is base and node.target is operator.getitem:
                place = node.args[1]
            node = source
        return base, place

    def _is_anew(self, base: fx.Node) -> bool:
        """Whether every run writes the memory that a node made."""
        return base.op == "call_function" and base not in self._constant

    def _value(self, node: fx.Node, place: int) -> Value:
        if node.op == "placeholder":
            self._placeholders += 1
            if self._placeholders - 1 not in self._given:
                return self._inputs[self._placeholders - 1]
            self._arguments.append(self._register(self._inputs[self._placeholders - 1]))
            return self._arguments[-1]
        if node.op == "get_attr":
            return self._trace.constants[str(node.target)]
        args, kwargs = self._with_values(node.args), self._with_values(node.kwargs)
        if node.target is operator.getitem:
            parts, index = args
            assert isinstance(parts, tuple)
            part: Value = parts[index]
            return part
        op = node.target
        assert isinstance(op, OpOverload)
        changed = written_arguments(node)
        if changed:
            return self._in_place(node, op, changed[0], args, kwargs)
        static = not any(isinstance(value, Register) for value in _leaves((args, kwargs)))
        base = self._trace.base(node)
        if base is not node and op in _ITSELF:
            shown: Value = args[0]
            return shown
        if base is not node and static:
            made = op(*args, **kwargs)  # a view of memory that stays
            return tuple(made) if isinstance(made, (list, tuple)) else made
        name = op.overloadpacket.__name__
        if base is node and base not in self._fresh:
            if name in _UNFILLED or (name in _FILLED and node not in self._trace.changed):
                return self._filled(node, op)
            found = _with_out(op)
            if found is not None:
                out_op, names, more = found
                over = self._taken_over(node, op, place)
                buffers = self._buffers(node, place) if over is None else (over,)
                self._calls.append(
                    Call(out_op, (*args, *more), {**kwargs, **dict(zip(names, buffers, strict=True))}, ())
                )
                return buffers[0] if isinstance(node.meta["val"], Tensor) else buffers
        return self._call(node, op, args, kwargs)

    def _taken_over(self, node: fx.Node, op: OpOverload, place: int) -> Tensor | Register | None:
        """Memory of an argument that nothing reads after this call, where each value goes in the place of another.

        Large results are then written where the argument has just been read, and still is in the cache.
        """
        if torch.Tag.pointwise not in op.tags or node in self._kept:
            return None
        made = node.meta["val"]
        for source in node.all_input_nodes:
            value = self._values[source]
            shared = [other for other in node.all_input_nodes if self._trace.base(other) is source]
            if source not in self._made or self._last_use[source] > place or shared != [source]:
                continue
            like = source.meta["val"]
            if (like.shape, like.stride(), like.dtype) == (made.shape, made.stride(), made.dtype):
                assert isinstance(value, (Tensor, Register))
                self._made.add(node)
                for idle in self._idle.values():
                    idle[:] = [(self._last_use[node] if b is value else last, b) for last, b in idle]
                return value
        return None

    def _filled(self, node: fx.Node, op: OpOverload) -> Tensor:
        """What an operation gives that looks at no values: made once, of tensors like those in the trace."""
        if node not in self._trace.changed:
            self._constant.add(node)
        args, kwargs = _mapped((node.args, node.kwargs), lambda source: _empty_like(source.meta["val"]))
        made: Tensor = op(*args, **kwargs)
        return _empty_like(node.meta["val"]).copy_(made)

    def _in_place(
        self, node: fx.Node, op: OpOverload, changed: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Value:
        if op.overloadpacket.__name__ in _MOVING:
            raise CannotPlanError(f"{op} moves a tensor to other memory")
        if self._trace.base(node) is node:
            raise CannotPlanError(f"{op} changes one tensor and gives another")
        value = self._values[changed]
        if torch.Tag.inplace_view in op.tags and isinstance(value, Tensor):
            # transpose_ and the like: where it lies is known now, and in every run the same.
            view: Tensor = _ATEN.alias(value)
            op(view, *args[1:], **kwargs)
            return view
        self._calls.append(Call(op, args, kwargs, ()))
        return value

    def _call(self, node: fx.Node, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
        made = node.meta["val"]
        many = isinstance(made, (list, tuple))
        if isinstance(made, Tensor) and self._trace.base(node) is node:
            self._made.add(node)
        results = tuple(map(self._register, made if many else (made,)))
        self._calls.append(Call(op, args, kwargs, results))
        return results if many else results[0]

    def _register(self, like: Any) -> Register:
        self._registers += 1
        return Register(self._registers - 1, like)

    def _with_values(self, arguments: Any) -> Any:
        """Arguments of a node with values in the place of nodes."""
        return _mapped(arguments, self._values.__getitem__)

    def _buffers(self, node: fx.Node, place: int) -> tuple[Tensor, ...]:
        """Memory for what a node gives: some that nothing needs any more, or new."""
        made = node.meta["val"]
        buffers = []
        for like in (made,) if isinstance(made, Tensor) else made:
            key = (tuple(like.shape), tuple(like.stride()), like.dtype, like.device)
            idle = self._idle.setdefault(key, [])
            at = next((n for n, (last, _) in enumerate(idle) if last < place), None)
            buffer = _empty_like(like) if at is None or node in self._kept else idle.pop(at)[1]
            if node not in self._kept:
                idle.append((self._last_use[node], buffer))
            buffers.append(buffer)
        if isinstance(made, Tensor):
            self._made.add(node)
        return tuple(buffers)


def _mapped(arguments: Any, value: Callable[[fx.Node], Any]) -> Any:
    """Arguments with something else in the place of nodes."""
    if isinstance(arguments, fx.Node):
        return value(arguments)
    if isinstance(arguments, (list, tuple)):
        return type(arguments)([_mapped(part, value) for part in arguments])
    if isinstance(arguments, Mapping):
        return {name: _mapped(part, value) for name, part in arguments.items()}
    return arguments


def _empty_like(traced: Any) -> Tensor:
    return torch.empty_strided(tuple(traced.shape), tuple(traced.stride()), dtype=traced.dtype, device=traced.device)


def _with_out(op: OpOverload) -> tuple[OpOverload, tuple[str, ...], tuple[Any, ...]] | None:
    """An operation's own variant that writes into memory at hand, the names of that memory, and further arguments."""
    if op in _SAME:
        variant, more = _SAME[op]
        return variant, ("out",), more
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    packet = op.overloadpacket
    for name in packet.overloads():
        variant = getattr(packet, name)
        outs = tuple(
            a.name for a in variant._schema.arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write
        )
        rest = [(a.name, str(a.type)) for a in variant._schema.arguments if a.name not in outs]
        # Generated variants compute elsewhere and copy.
        if outs and len(outs) == len(op._schema.returns) and rest == wanted and torch.Tag.generated not in variant.tags:
            return variant, outs, ()
    return None


def _forgetting(calls: Sequence[Call], outputs: Sequence[Value]) -> tuple[Call, ...]:
    """The same calls, each of which forgets what no later call reads."""
    needed = {value for value in _leaves(outputs) if isinstance(value, Register)}
    done: list[Call] = []
    for call in reversed(calls):
        read = {value for value in _leaves((call.args, dict(call.kwargs), call.results)) if isinstance(value, Register)}
        last = sorted(read - needed, key=lambda register: register.number)
        needed |= read
        done.append(Call(call.op, call.args, call.kwargs, call.results, tuple(last)))
    return tuple(reversed(done))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, Mapping):
        yield from _leaves(tuple(value.values()))
    else:
        yield value
