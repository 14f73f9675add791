# SPDX-License-Identifier: Apache-2.0
"""Checks values against kinds, and says what is wrong with them in a few words."""

from __future__ import annotations

import difflib
import inspect
import reprlib
from collections.abc import Callable, Collection, Mapping
from functools import cache, wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast, get_type_hints

from torch import Tensor

from fl_lightning.arguments.kinds import ANY, Kind, Mismatch, Rule, has_numbers, kind_of

C = TypeVar("C", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")
_ELSEWHERE = {
    **dict.fromkeys(("rounds", "num_rounds"), "Trainer(max_epochs=...) is the number of rounds"),
    "num_clients": "the partition of the data says how many, as in fl.data.IID(num_clients=10)",
    "lr": "configure_optimizers of the module chooses the optimizer",
    "batch_size": "the data module or its loader has it",
}
"""Arguments that people look for where they are not."""


def checked(**rules: Rule) -> Callable[[C], C]:
    """Checks every argument of a function, or of a class's constructor, by its annotation."""

    def decorate(target: C) -> C:
        if inspect.isclass(target):
            setattr(target, "__init__", _wrapped(vars(target)["__init__"], "__init__", rules))  # noqa: B010
            return cast("C", target)
        return cast("C", _wrapped(target, target.__qualname__.split("<locals>.")[-1], rules))

    return decorate


class _Trusted(Protocol):
    def __call__(self, target: Callable[P, T]) -> Callable[P, T]: ...


def _unchecked(target: Any) -> Callable[..., Any]:
    """A checked class or function without its checks, for arguments that the library itself has made."""
    if not inspect.isclass(target):
        return cast("Callable[..., Any]", target.__wrapped__)
    init = vars(target)["__init__"].__wrapped__

    def made(*args: Any, **kwargs: Any) -> Any:
        instance = object.__new__(target)
        init(instance, *args, **kwargs)
        return instance

    return made


trusted = cast("_Trusted", cache(_unchecked))


def altered(record: T, **changes: Any) -> T:
    """A record of a checked dataclass with other values, which the library itself has made; they are not checked."""
    return trusted(type(record))(**{**vars(record), **changes})


def check(name: str, value: Any, annotation: Any, rule: Rule | None = None) -> Any:
    """One value of an annotation's kind, as the library keeps it; a TypeError or ValueError calls it ``name``."""
    return _taken(name, value, _known_kind(annotation, rule))


_known_kind = cache(kind_of)


def check_unused(name: str, value: Any, default: Any, why: str) -> None:
    """Refuses an option that others leave without meaning, unless it has its default; ``why`` ends the error's rule."""
    if value != default:
        raise ValueError(f"{name} must be left out {why}, found {shown(value)}: it would change nothing")


def _wrapped(function: Callable[..., Any], owner: str, rules: Mapping[str, Rule]) -> Callable[..., Any]:
    makes = owner.endswith("__init__")
    order: list[str] = []
    kinds: dict[str, Kind] = {}
    takes_more: list[bool] = []

    def prepare() -> None:
        parameters = inspect.signature(function).parameters
        hints, names = get_type_hints(function), list(parameters)
        unknown = rules.keys() - set(names)
        assert not unknown, f"{owner} must have the arguments {sorted(unknown)} that rules are for"
        kinds.update({n: kind_of(hints[n], rules.get(n)) for n in names if n in hints and rules.get(n) is not ANY})
        takes_more.append(any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()))
        order.extend(names)

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not order:
            prepare()
        given, subject = list(args), args[0] if makes else owner
        for place, name in enumerate(order[: len(given)]):
            if name in kinds:
                given[place] = _taken(name, given[place], kinds[name], subject)
        for name, value in kwargs.items():
            if name in kinds:
                kwargs[name] = _taken(name, value, kinds[name], subject)
            elif name not in order and not takes_more[0]:
                of = type(args[0]).__name__ if makes else owner
                raise TypeError(f"{of} has no argument {name!r}{nearest(name, order)}")
        return function(*given, **kwargs)

    return wrapper


def _taken(name: str, value: Any, kind: Kind, owner: object = "") -> Any:
    try:
        return kind.take(kind, value)
    except Mismatch as found:
        of = owner if isinstance(owner, str) else type(owner).__name__
        hint = nearest(found.value, found.kind.choices)
        where = "".join(f"[{shown(place)}]" for place in found.where)
        text = f"{name}{where}{of and f' of {of}'} must be {found.kind.wanted}, found {shown(found.value)}{hint}"
        error = found.error
    raise error(text)


def nearest(value: Any, choices: Collection[Any]) -> str:
    """``": did you mean 'a'?"`` with the choice that is most like a text, or where its like is; empty if neither."""
    if not isinstance(value, str):
        return ""
    if value in _ELSEWHERE:
        return f": {_ELSEWHERE[value]}"
    by_text = {str(choice).casefold(): choice for choice in choices}
    near = difflib.get_close_matches(value.casefold(), by_text, n=1, cutoff=0.5)
    return f": did you mean {by_text[near[0]]!r}?" if near else ""


class _Short(reprlib.Repr):
    """Knows the kinds whose own words are long, fail, or take several lines, also inside containers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"an integer of {x.bit_length()} bits"

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, Tensor):
            return _tensor(x) if x.dim() or not has_numbers(x) else repr(x)
        shape = getattr(x, "shape", ())
        if isinstance(shape, tuple) and shape and hasattr(x, "dtype"):
            return f"an array of {x.dtype} and shape {list(shape)}"
        text = super().repr_instance(x, level)
        return text if "\n" not in text else f"<{type(x).__name__} object>"


def _tensor(tensor: Tensor) -> str:
    if tensor.is_nested:
        return f"a nested tensor of {tensor.dtype}"
    layout = str(tensor.layout).removeprefix("torch.")
    kind = "a meta tensor" if tensor.is_meta else "a tensor" if has_numbers(tensor) else f"a {layout} tensor"
    return f"{kind} of {tensor.dtype} and shape {list(tensor.shape)}"


_short = _Short()


def shown(value: Any) -> str:
    """A value in a few words of one line."""
    return _short.repr(value)
