# SPDX-License-Identifier: Apache-2.0
"""Annotations as functions that take a value or refuse it, and what an annotation cannot say about an argument."""

from __future__ import annotations

import math
import operator
import os
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import torch
from torch import Tensor

_ANYTHING = "anything"
_WORDS = {
    Tensor: "a dense tensor", os.PathLike: "a path", dict: "a dict", list: "a list", bytes: "bytes",
    types.NoneType: "None", Iterable: "an iterable",
}  # fmt: skip
_NO_NAME = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")  # names end up in files, and as files


@dataclass(frozen=True)
class Bounds:
    """The range of a number, or of all numbers in a sequence or mapping."""

    least: float = -math.inf  # allowed itself, as is most
    most: float = math.inf
    above: float = -math.inf  # the number is larger, and smaller than below
    below: float = math.inf
    finite: bool = True  # NaN and infinities are refused
    filled: bool = False  # an empty sequence is refused
    wording: str = ""  # in place of the usual words

    def words(self, integer: bool) -> str:
        """Such as ``"a number from 0 to below 1"``."""
        if self.wording:
            return self.wording
        kind = "an integer" if integer else "a number"
        low = f" from {self.least:g}" if self.least > -math.inf else ""
        low = f" above {self.above:g}" if self.above > -math.inf else low
        if self.most == self.below == math.inf:
            if self.above == 0 or (integer and self.least == 1):
                return "a positive integer" if integer else "a positive, finite number"
            return f"{'a finite number' if self.finite and not integer else kind}{low}{' on' * bool(low)}"
        if self.above > -math.inf and self.below < math.inf:
            return f"{kind} strictly between {self.above:g} and {self.below:g}"
        high = f" to below {self.below:g}" if self.below < math.inf else f" to {self.most:g}"
        return f"{kind}{low}{f' and at most {self.most:g}' if self.above > -math.inf else high}"

    def admits(self, number: float) -> bool:
        """Whether a number is finite and lies in the range."""
        if isinstance(number, float) and not math.isfinite(number):
            return not self.finite and (math.isnan(number) or number > self.least)
        return self.least <= number <= self.most and self.above < number < self.below


@dataclass(frozen=True)
class Text:
    """What a string must be."""

    wanted: str
    admits: Callable[[str], bool]


@dataclass(frozen=True)
class Example:
    """How an object or a function is made, for errors."""

    text: str
    kind: str = ""  # in words, where the name of its class would not help


Rule = Bounds | Text | Example


def _names_device(text: str) -> bool:
    with suppress(RuntimeError):
        return torch.device(text) is not None
    return False


ANY = Text(_ANYTHING, lambda text: True)  # the function checks the argument itself
FILLED = Bounds(filled=True)  # a sequence has at least one entry
TEXT = Text("a string", lambda text: True)  # a string may be empty
DEVICE = Text("the name of a torch device such as 'cpu'", _names_device)


@dataclass(frozen=True)
class Kind:
    """What an annotation stands for."""

    wanted: str  # in words
    take: Callable[[Kind, Any], Any]  # returns the value as the library keeps it, or raises Mismatch
    choices: tuple[Any, ...] = ()  # where they are listed


class Mismatch(Exception):  # noqa: N818 - becomes a TypeError or a ValueError
    """A value that is not of a kind: a TypeError of another one, a ValueError where it breaks a rule."""

    def __init__(self, kind: Kind, value: Any, error: type[Exception] = TypeError, *where: Any) -> None:
        super().__init__()
        self.kind, self.value, self.error, self.where = kind, value, error, where  # places inside the argument


def kind_of(annotation: Any, rule: Rule | None = None) -> Kind:
    """The kind that an annotation stands for; a rule holds for the numbers, strings or objects in it."""
    origin, entries = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return Kind(listed([repr(entry) for entry in entries]), _choice, entries)
    if origin in (Union, types.UnionType):
        return _union([kind_of(entry, rule) for entry in entries])
    if origin is not None and issubclass(origin, Callable):  # type: ignore[arg-type]
        return _function(entries[-1] if entries else Any, rule)
    if origin is not None and issubclass(origin, Mapping):
        keys, values = (kind_of(entry, rule) for entry in entries)
        return Kind("a mapping", _mapping(replace(keys, wanted=f"under a key that is {keys.wanted}"), values))
    if origin is tuple and entries[-1] is not Ellipsis:
        return _fixed([kind_of(entry, rule) for entry in entries])
    if origin is not None and issubclass(origin, Collection):
        filled = isinstance(rule, Bounds) and rule.filled
        words = "a sequence" + " that is not empty" * filled
        return Kind(words, _sequence(kind_of(entries[0], rule), origin is tuple, filled))
    return _plain_kind(origin or annotation, rule)


def _plain_kind(cls: Any, rule: Rule | None) -> Kind:
    if cls in (Any, object):
        return Kind(_ANYTHING, _if(lambda value: True))
    if cls is bool:
        return Kind("True or False", _if(lambda value: isinstance(value, bool), _pythons))
    if cls in (int, float):
        bounds = rule if isinstance(rule, Bounds) else Bounds()
        return Kind(bounds.words(cls is int), _number(cls is int, bounds))
    if cls is str:
        text = rule if isinstance(rule, Text) else Text("a string that is not empty", bool)
        return Kind(text.wanted, _string(text))
    if getattr(cls, "_is_protocol", False):
        needed = [name for name in vars(cls) if not name.startswith("_")]
        fits = _if(lambda value: all(hasattr(value, name) for name in needed))
        return Kind(f"an object with {listed(needed, 'and')}", fits)
    cls = {Path: os.PathLike, None: types.NoneType}.get(cls, cls)
    fits = _if(lambda v: isinstance(v, cls) and not isinstance(v, str) and (cls is not Tensor or has_numbers(v)))
    return Kind(_with_example(_named(cls), rule), fits)


def _named(cls: type) -> str:
    return _WORDS.get(cls, f"{'an' if cls.__name__[0] in 'AEIOU' else 'a'} {cls.__name__}")


def _with_example(words: str, rule: Rule | None) -> str:
    return f"{rule.kind or words} such as {rule.text}" if isinstance(rule, Example) and words != "None" else words


def _number(integer: bool, bounds: Bounds) -> Callable[[Kind, Any], Any]:
    # Counts end up in int64 tensors. Seeds are hashed, but a number must fit into a float to be compared with others.
    bits = 63 if integer and bounds != Bounds() else 1023

    def take(kind: Kind, value: Any) -> Any:
        number: Any = value
        if type(value) is not int and (integer or type(value) is not float):  # the common kinds are quick
            number = _pythons(value)
            if isinstance(number, bool) or not isinstance(number, Integral if integer else Real):
                raise Mismatch(kind, value)
            number = int(number) if isinstance(number, Integral) else float(number)
        wide = f", of at most {bits} bits" * (type(number) is int and number.bit_length() > bits)
        if wide or not bounds.admits(number):
            raise Mismatch(replace(kind, wanted=kind.wanted + wide), value, ValueError)
        return number

    return take


def _string(text: Text) -> Callable[[Kind, Any], str]:
    def take(kind: Kind, value: Any) -> str:
        if not isinstance(value, str):
            raise Mismatch(kind, value)
        odd = ", without NUL or lone surrogates" if _NO_NAME.search(value) else ""
        if odd or not text.admits(value):
            raise Mismatch(replace(kind, wanted=kind.wanted + odd), value, ValueError)
        return value

    return take


def _choice(kind: Kind, value: Any) -> Any:
    if any(type(value) is type(choice) and value == choice for choice in kind.choices):
        return value
    raise Mismatch(kind, value, ValueError if isinstance(value, str) else TypeError)


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
        same = all(a is b and taken[a] is value[b] for a, b in zip(taken, value, strict=True))
        return value if same else taken

    return take


def _sequence(items: Kind, as_tuple: bool, filled: bool) -> Callable[[Kind, Any], Any]:
    def take(kind: Kind, value: Any) -> Any:
        entries: Any = value
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            readable = has_numbers(value) if isinstance(value, Tensor) else hasattr(value, "tolist")
            if not readable or getattr(value, "ndim", 0) == 0:
                raise Mismatch(kind, value)
            entries = entries.tolist()
        if filled and len(entries) == 0:
            raise Mismatch(kind, value, ValueError)
        known = items.wanted == _ANYTHING
        taken = entries if known else [_entry(items, entry, place) for place, entry in enumerate(entries)]
        made: type[Any] = tuple if as_tuple or isinstance(value, tuple) else list
        same = made is list or type(value) is tuple
        return value if same and all(map(operator.is_, taken, entries)) else made(taken)

    return take


def _fixed(items: list[Kind]) -> Kind:
    def take(kind: Kind, value: Any) -> Any:
        of_kind = isinstance(value, (tuple, list))
        if not of_kind or len(value) != len(items):
            raise Mismatch(kind, value, ValueError if of_kind else TypeError)
        return tuple(_entry(item, value[place], place) for place, item in enumerate(items))

    return Kind(f"{len(items)} entries, {listed([item.wanted for item in items], 'and')}", take)


def _entry(kind: Kind, value: Any, place: Any) -> Any:
    try:
        return kind.take(kind, value)
    except Mismatch as found:
        raise Mismatch(found.kind, found.value, found.error, place, *found.where) from None


def _if(fits: Callable[[Any], bool], made: Callable[[Any], Any] = lambda value: value) -> Callable[[Kind, Any], Any]:
    """Takes values that fit, as they are or made into others before."""

    def take(kind: Kind, value: Any) -> Any:
        found = made(value)
        if not fits(found):
            raise Mismatch(kind, value)
        return found

    return take


def _function(annotation: Any, rule: Rule | None) -> Kind:
    """A function, by what it returns; not a class whose objects are anything else."""
    made, words = object, "a function"
    plain = isinstance(annotation, type) and get_origin(annotation) is None and annotation is not types.NoneType
    if plain and annotation is not object and not getattr(annotation, "_is_protocol", False):
        made, words = annotation, f"a function that returns {_named(annotation)}"
    fits = _if(lambda value: callable(value) and (not isinstance(value, type) or issubclass(value, made)))
    return Kind(_with_example(words, rule), fits)


def has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor's numbers can be read one by one: it is dense, and not on the meta device."""
    empty = tensor.is_meta and type(tensor) in (Tensor, torch.nn.Parameter)  # others' may be somewhere else
    return not (empty or tensor.is_nested or tensor.layout != torch.strided)


def _pythons(value: Any) -> Any:
    """A number of numpy, or a tensor or array without dimensions, as Python's; other values as they are."""
    if isinstance(value, Tensor) and not has_numbers(value):
        return value
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def listed(words: list[str], last: str = "or") -> str:
    """Words as a list in a sentence."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1])))
