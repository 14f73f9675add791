# SPDX-License-Identifier: Apache-2.0
"""Methods as people write them on a command line: ``FedLF`` or ``QFedAvg(q=2)``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal

from fl_lightning import algorithms
from fl_lightning.algorithms import ServerRule
from fl_lightning.arguments import TEXT, checked, nearest
from fl_lightning.report.conclusion import LOCAL, POOLED

Bounding = Literal["both", "local", "pooled", "none"]
BOUNDS: Mapping[Bounding, tuple[str, ...]] = {
    "both": (LOCAL, POOLED), "local": (LOCAL,), "pooled": (POOLED,), "none": (),
}  # fmt: skip
"""Which bounds to train."""


def method_names() -> list[str]:
    """The methods of :mod:`fl_lightning.algorithms`."""
    return sorted((name for name, value in vars(algorithms).items() if _is_rule(value)), key=str.casefold)


@checked(text=TEXT)
def rule_from(text: str) -> ServerRule:
    """Makes the server rule that a text names: a name of :mod:`fl_lightning.algorithms`, or the import path of a class.

    Arguments in brackets are literals; nothing is evaluated.
    """
    name, positional, named = _call(text)
    kind = _class(name)
    try:
        inspect.signature(kind).bind(*positional, **named)
    except TypeError as error:
        takes = ", ".join(inspect.signature(kind).parameters) or "no arguments"
        raise TypeError(f"{name} takes {takes}, found {text!r}: {error}") from None
    return kind(*positional, **named)


def _call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        name = ast.unparse(call.func)
        if not all(map(str.isidentifier, name.split("."))) or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("no name, or ** in front of an argument")
        positional = [ast.literal_eval(argument) for argument in call.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"a method must be a name such as FedLF, with arguments such as QFedAvg(q=2), found {text!r}"
        ) from error
    return name, positional, named


def _class(name: str) -> type[ServerRule]:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(module) if module else algorithms, attribute)
    except (ImportError, AttributeError) as error:
        if module:
            raise ValueError(f"the method {name} cannot be imported: {error}") from error
        found = None
    if not module and not _is_rule(found):
        names = method_names()
        raise ValueError(f"there is no method {name!r}{nearest(name, names) or ':'} there are {', '.join(names)}")
    if not _is_rule(found):
        raise ValueError(f"the method {name} must be a subclass of fl_lightning.algorithms.ServerRule")
    return found  # type: ignore[no-any-return]


def _is_rule(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, ServerRule) and value is not ServerRule
