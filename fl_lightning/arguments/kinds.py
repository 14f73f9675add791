# SPDX-License-Identifier: Apache-2.0
"""Annotations as functions that take a value or refuse it."""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from torch import Tensor

from fl_lightning.arguments.rules import Bounds, Example, Rule, Text
from fl_lightning.arguments.values import has_numbers, is_array, plain, pythons, shown

_ANYTHING = "anything"
_WORDS = {Tensor: "a dense tensor", os.PathLike: "a path", dict: "a dict", list: "a list", bytes: "bytes"}


@dataclass(frozen=True)
class Kind:
    """What an annotation stands for."""

    wanted: str  # in words
    take: Callable[[Kind, Any], Any]  # returns the value as the library keeps it, or raises Mismatch
    choices: tuple[Any, ...] = ()  # where they are listed


class Mismatch(Exception):  # noqa: N818 - becomes a TypeError or a ValueError
    """A value that is not of a kind: a TypeError of another one, a ValueError where it breaks a rule."""

    def __init__(self, kind: Kind, value: Any, error: type[Exception] = TypeError, where: str = "") -> None:
        super().__init__()
        self.kind, self.value, self.error, self.where = kind, value, error, where  # inside the argument, such as "[3]"


def kind_of(annotation: Any, rule: Rule | None = None) -> Kind:
    """The kind that an annotation stands for; a rule holds for the numbers, strings or objects in it."""
    origin, entries = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return Kind(listed([repr(entry) for entry in entries]), _choice, entries)
    if origin in (Union, types.UnionType):
        return _union([kind_of(entry, rule) for entry in entries])
    if origin is not None and issubclass(origin, Callable):  # type: ignore[arg-type]
        made = _class_of(entries[-1] if entries else Any)
        words = "a function" if made is None else f"a function that returns {_named(made)}"
        return Kind(_with_example(words, rule), _if(lambda value: _makes(value, made)))
    if origin is not None and issubclass(origin, Mapping):
        keys, values = (kind_of(entry, rule) for entry in entries)
        return Kind("a mapping", _mapping(replace(keys, wanted=f"under a key that is {keys.wanted}"), values))
    if origin is tuple and entries[-1] is not Ellipsis:
        return _fixed([kind_of(entry, rule) for entry in entries])
    if origin is not None and issubclass(origin, Collection):
        filled = isinstance(rule, Bounds) and rule.filled
        words = "a sequence that is not empty" if filled else "a sequence"
        return Kind(words, _sequence(kind_of(entries[0], rule), origin is tuple, filled))
    if origin is not None and issubclass(origin, Iterable):
        return Kind("an iterable", _if(lambda value: isinstance(value, origin) and not isinstance(value, str)))
    return _plain_kind(origin or annotation, rule)


def _plain_kind(cls: Any, rule: Rule | None) -> Kind:
    if cls in (None, types.NoneType):
        return Kind("None", _if(lambda value: value is None))
    if cls in (Any, object):
        return Kind(_ANYTHING, _if(lambda value: True))
    if cls is bool:
        return Kind("True or False", _flag)
    if cls in (int, float):
        bounds = rule if isinstance(rule, Bounds) else Bounds()
        return Kind(bounds.words(cls is int), _number(cls is int, bounds))
    if cls is str:
        text = rule if isinstance(rule, Text) else Text("a string that is not empty", bool)
        return Kind(text.wanted, _string(text))
    if getattr(cls, "_is_protocol", False):
        needed = [name for name in vars(cls) if not name.startswith("_")]
        return Kind(
            f"an object with {listed(needed, 'and')}", _if(lambda value: all(hasattr(value, name) for name in needed))
        )
    if cls in (Path, os.PathLike):
        return Kind(_with_example(_named(os.PathLike), rule), _path)
    dense = cls is Tensor
    take = _if(lambda value: isinstance(value, cls) and (not dense or has_numbers(value)))
    return Kind(_with_example(_named(cls), rule), take)


def _named(cls: type) -> str:
    return _WORDS.get(cls, f"{'an' if cls.__name__[0] in 'AEIOU' else 'a'} {cls.__name__}")


def _with_example(words: str, rule: Rule | None) -> str:
    return f"{rule.kind or words} such as {rule.text}" if isinstance(rule, Example) else words


def _flag(kind: Kind, value: Any) -> bool:
    flag = value if isinstance(value, bool) else pythons(value)
    if not isinstance(flag, bool):
        raise Mismatch(kind, value)
    return flag


def _number(integer: bool, bounds: Bounds) -> Callable[[Kind, Any], Any]:
    # Counts end up in int64 tensors. Seeds are hashed, but a number must fit into a float to be compared with others.
    bits = 63 if integer and bounds != Bounds() else 1023

    def take(kind: Kind, value: Any) -> Any:
        number: Any = value
        if type(value) is not int and (integer or type(value) is not float):  # the common kinds are quick
            number = pythons(value)
            if isinstance(number, bool) or not isinstance(number, Integral if integer else Real):
                raise Mismatch(kind, value)
            number = plain(number)
        if not bounds.admits(number):
            raise Mismatch(kind, value, ValueError)
        if type(number) is int and number.bit_length() > bits:
            raise Mismatch(replace(kind, wanted=f"{kind.wanted}, of at most {bits} bits"), value, ValueError)
        return number

    return take


def _string(text: Text) -> Callable[[Kind, Any], str]:
    def take(kind: Kind, value: Any) -> str:
        if not isinstance(value, str):
            raise Mismatch(kind, value)
        if not text.admits(value):
            raise Mismatch(kind, value, ValueError)
        _check_text(kind, value)
        return value

    return take


def _check_text(kind: Kind, text: str) -> None:
    """Names end up in files, and as files: neither can hold NUL or half a surrogate pair."""
    try:
        text.encode(errors="surrogateescape")  # names of files may have undecodable bytes
        fine = "\0" not in text
    except UnicodeEncodeError:
        fine = False
    if not fine:
        raise Mismatch(replace(kind, wanted=f"{kind.wanted}, without NUL or lone surrogates"), text, ValueError)


def _choice(kind: Kind, value: Any) -> Any:
    if not any(type(value) is type(choice) and value == choice for choice in kind.choices):
        raise Mismatch(kind, value, ValueError if isinstance(value, str) else TypeError)
    return value


def _union(kinds: list[Kind]) -> Kind:
    def take(kind: Kind, value: Any) -> Any:
        found = []
        for entry in kinds:
            try:
                return entry.take(entry, value)
            except Mismatch as mismatch:  # noqa: PERF203 - few entries, and the first mostly fits
                found.append(mismatch)
        deepest = max(found, key=lambda mismatch: len(mismatch.where))
        if deepest.where:
            raise deepest
        raise Mismatch(kind, value, ValueError if any(m.error is ValueError for m in found) else TypeError)

    choices = tuple(choice for kind in kinds for choice in kind.choices)
    words = [word for kind in kinds for word in (map(repr, kind.choices) if kind.choices else [kind.wanted])]
    return Kind(listed(list(dict.fromkeys(sorted(words, key=lambda word: word != "None")))), take, choices)


def _mapping(keys: Kind, values: Kind) -> Callable[[Kind, Any], Any]:
    def take(kind: Kind, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Mismatch(kind, value)
        taken = {_entry(keys, key, key): _entry(values, entry, key) for key, entry in value.items()}
        return value if _same(taken, value) and _same(taken.values(), value.values()) else taken

    return take


def _sequence(items: Kind, as_tuple: bool, filled: bool) -> Callable[[Kind, Any], Any]:
    def take(kind: Kind, value: Any) -> Any:
        entries: Any = value
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            if not is_array(value):
                raise Mismatch(kind, value)
            entries = entries.tolist()
        if filled and len(entries) == 0:
            raise Mismatch(kind, value, ValueError)
        taken = entries
        if items.wanted != _ANYTHING:
            taken = [_entry(items, entry, place) for place, entry in enumerate(entries)]
        if as_tuple or isinstance(value, tuple):
            return value if type(value) is tuple and _same(taken, value) else tuple(taken)
        return value if _same(taken, entries) else taken

    return take


def _fixed(items: list[Kind]) -> Kind:
    def take(kind: Kind, value: Any) -> Any:
        if not isinstance(value, (tuple, list)):
            raise Mismatch(kind, value)
        if len(value) != len(items):
            raise Mismatch(kind, value, ValueError)
        return tuple(_entry(item, value[place], place) for place, item in enumerate(items))

    return Kind(f"{len(items)} entries, {listed([item.wanted for item in items], 'and')}", take)


def _entry(kind: Kind, value: Any, place: Any) -> Any:
    try:
        return kind.take(kind, value)
    except Mismatch as found:
        raise Mismatch(found.kind, found.value, found.error, f"[{shown(place)}]{found.where}") from None


def _if(fits: Callable[[Any], bool]) -> Callable[[Kind, Any], Any]:
    """Takes values that fit as they are."""

    def take(kind: Kind, value: Any) -> Any:
        if not fits(value):
            raise Mismatch(kind, value)
        return value

    return take


def _path(kind: Kind, value: Any) -> Any:
    if not isinstance(value, os.PathLike):
        raise Mismatch(kind, value)
    _check_text(kind, os.fsdecode(value))
    return value


def _class_of(annotation: Any) -> type | None:
    """The class that an annotation names, if objects can be told to be of it."""
    if not inspect.isclass(annotation) or get_origin(annotation) is not None:
        return None
    vague = annotation in (Any, object, types.NoneType) or getattr(annotation, "_is_protocol", False)
    return None if vague else annotation


def _makes(function: Any, made: type | None) -> bool:
    """Whether this can be called, and is not a class whose objects are not what the function should return."""
    wrong = made is not None and isinstance(function, type) and not issubclass(function, made)
    return callable(function) and not wrong


def _same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(some, others, strict=True))


def listed(words: list[str], last: str = "or") -> str:
    """Words as a list in a sentence."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1])))
