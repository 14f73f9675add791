# SPDX-License-Identifier: Apache-2.0
"""Names and signatures of all that is public, one a line, in ``public_api.txt`` beside this file.

After a change that is meant: ``python tests/project/public_api.py --write``, and commit the file.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ForwardRef

FILE = Path(__file__).with_suffix(".txt")
ROOT = "fl_lightning"
INTEGRATIONS = {"fl_lightning.federation.nvflare": "nvflare", "fl_lightning.algorithms.torchjd": "torchjd"}
"""Public modules that the root does not import, and what each needs."""


def public_names(module: types.ModuleType) -> list[str]:
    """``__all__``; without it, what the module defines under a name without underscore."""
    own = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return sorted(getattr(module, "__all__", (name for name in own if not name.startswith("_"))))


def annotation_text(annotation: Any) -> str:
    """As it is written in the source, whatever Python makes of it."""
    if isinstance(annotation, ForwardRef):
        return annotation.__forward_arg__
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def default_text(value: Any) -> str:
    """A default without its place in memory."""
    name = getattr(value, "__qualname__", None)
    return name or (type(value).__name__ if " at 0x" in repr(value) else repr(value))


def signature_text(function: Any) -> str:
    """Parameters and what is returned; the first parameter of a method stays."""
    signature = inspect.signature(function)
    parts, starred = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {annotation_text(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {default_text(parameter.default)}"
        parts.append(text)
    returned = signature.return_annotation
    return f"({', '.join(parts)})" + ("" if returned is signature.empty else f" -> {annotation_text(returned)}")


def member_text(value: Any, annotation: Any) -> str:
    """What follows the name of a class's member."""
    if isinstance(value, (staticmethod, classmethod)):
        return f"{signature_text(value.__func__)}  [{type(value).__name__}]"
    if isinstance(value, (property, functools.cached_property)):
        getter = value.fget if isinstance(value, property) else value.func
        return f": {annotation_text(inspect.signature(getter).return_annotation)}  [property]"
    if inspect.isfunction(value):
        return signature_text(value)
    return ": " + (type(value).__name__ if annotation is None else annotation_text(annotation))


def class_lines(name: str, cls: type, public: set[type]) -> Iterator[str]:
    """A class's bases, its constructor, and the members that no public base has already."""
    yield f"{name}: class of {', '.join(base.__name__ for base in cls.__bases__)}"
    ours = [base for base in cls.__mro__ if base.__module__.startswith(ROOT)]
    maker = next(base for base in cls.__mro__ if {"__init__", "__new__"} & vars(base).keys())
    if maker in ours:
        yield name + signature_text(vars(maker).get("__init__") or vars(maker)["__new__"])
    members: dict[str, str] = {}
    for base in ours:
        if base is not cls and base in public:
            continue
        annotations = vars(base).get("__annotations__", {})
        for member in sorted({*annotations, *vars(base)}):
            if not member.startswith("_"):
                text = member_text(vars(base).get(member), annotations.get(member))
                members.setdefault(member, f"{name}.{member}{text}")
    yield from sorted(members.values())


def public_objects() -> dict[str, Any]:
    """All public objects by the names under which users find them, modules left out."""
    found: dict[str, Any] = {}
    modules = {ROOT: importlib.import_module(ROOT)}
    for name, needed in INTEGRATIONS.items():
        if importlib.util.find_spec(needed) is not None:
            modules[name] = importlib.import_module(name)
    while modules:
        place, module = modules.popitem()
        for name in public_names(module):
            value = getattr(module, name)
            if inspect.ismodule(value):
                modules[f"{place}.{name}"] = value
            else:
                found[f"{place}.{name}"] = value
    return found


def lines() -> list[str]:
    """The public interface of this installation."""
    objects = public_objects()
    public = {value for value in objects.values() if inspect.isclass(value)}
    names: dict[int, str] = {}
    found = []
    for name, value in sorted(objects.items()):
        first = names.setdefault(id(value), name)
        if first != name and callable(value):
            found.append(f"{name} = {first}")
        elif inspect.isclass(value):
            found += class_lines(name, value, public)
        elif callable(value) and hasattr(value, "__name__"):
            found.append(name + signature_text(value))
        else:
            found.append(f"{name}: {type(value).__name__}")
    return found


def absent() -> tuple[str, ...]:
    """Public modules that this installation cannot import."""
    return tuple(name for name, needed in INTEGRATIONS.items() if importlib.util.find_spec(needed) is None)


def recorded() -> list[str]:
    """The public interface as it was committed, as far as this installation can have it."""
    return [line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith(absent())]


def renewed() -> list[str]:
    """That of this installation; modules that it cannot import stay as they were committed."""
    found, before = lines(), FILE.read_text(encoding="utf-8").splitlines()
    for module in absent():
        place = next((k for k, line in enumerate(found) if line > module), len(found))
        found[place:place] = [line for line in before if line.startswith(module)]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"renew {FILE.name}")
    if parser.parse_args().write:
        FILE.write_text("".join(f"{line}\n" for line in renewed()), encoding="utf-8")
    else:
        print("\n".join(lines()))
