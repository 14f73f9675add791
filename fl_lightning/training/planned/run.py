# SPDX-License-Identifier: Apache-2.0
"""A program as one Python function: its calls in a row, with everything they need bound to names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fl_lightning.training.planned.program import Call, Program, Register
from fl_lightning.training.planned.quick_calls import quick


def function_of(program: Program) -> Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Writes the function: it takes the program's arguments, and gives what the program returns and the gradients."""
    writer = _Source(program.arguments)
    for call in program.calls:
        writer.add(call)
    run: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]] = writer.function(program.returned, program.gradients)
    return run


class _Source:
    """Source text of a function, and what the names in it stand for."""

    def __init__(self, arguments: tuple[Register, ...]) -> None:
        self._names: dict[str, Any] = {}
        self._known: dict[int, str] = {}
        self._lines = [f"def run({', '.join(f'r{register.number}' for register in arguments)}):"]

    def add(self, call: Call) -> None:
        """A line for a call, and one for what nobody reads after it."""
        given = [self._text(value) for value in call.args]
        given += [f"{name}={self._text(value)}" for name, value in call.kwargs.items()]
        made = "".join(f"r{register.number}, " for register in call.results)
        target = f"{made if len(call.results) > 1 else made.rstrip(', ')} = " if made else ""
        self._lines.append(f"    {target}{self._name(quick(call.op, call.args, call.kwargs))}({', '.join(given)})")
        if call.forgets:
            self._lines.append("    " + " = ".join(f"r{register.number}" for register in call.forgets) + " = None")

    def function(self, returned: tuple[Any, ...], gradients: tuple[Any, ...]) -> Any:
        self._lines.append(f"    return {self._text(returned)}, {self._text(gradients)}")
        exec(compile("\n".join(self._lines), "<planned step>", "exec"), self._names)
        return self._names["run"]

    def _text(self, value: Any) -> str:
        if isinstance(value, Register):
            return f"r{value.number}"
        if isinstance(value, (list, tuple)) and any(isinstance(part, (Register, list, tuple)) for part in value):
            parts = "".join(f"{self._text(part)}, " for part in value)
            return f"[{parts}]" if isinstance(value, list) else f"({parts})"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self._name(value)

    def _name(self, value: Any) -> str:
        if id(value) not in self._known:
            name = self._known[id(value)] = f"v{len(self._known)}"
            self._names[name] = value
        return self._known[id(value)]
