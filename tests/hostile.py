# SPDX-License-Identifier: Apache-2.0
"""What somebody who means harm, or whose program is broken, puts in the place of a message."""

from __future__ import annotations

import math
import os
import pickle
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

NUMBERS = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e30, 1e308, -1e308, math.nan,
    math.inf, -math.inf,
)  # fmt: skip
TEXTS = ("", "x", "x" * 10**6, "\ud800", "\0", "line\nbreak", "../../up", "\u202e", "val", "\U0001f600" * 300)
CASES = int(os.environ.get("FL_LIGHTNING_FUZZ", "100"))
"""Messages that a test tries per side; 5,000 take minutes."""
DEEPEST = 20
"""Levels of a message below which nothing is changed."""
MEGABYTES = 300
"""By how much the largest size of the process may grow meanwhile."""


def deep(levels: int) -> list[Any]:
    """Lists in lists."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def collection(dice: random.Random) -> Any:
    """A list or a mapping of no use."""
    makers = (
        list,
        dict,
        lambda: deep(dice.choice((5, 50, 800))),
        lambda: list(range(dice.choice((3, 10**5)))),
        lambda: dict.fromkeys(range(dice.choice((3, 10**5))), 1.0),
        lambda: {"": {"": {"": None}}},
    )
    return dice.choice(makers)()


def tensor(dice: random.Random, like: Tensor | None = None) -> Tensor:
    """A tensor in the place of another."""
    whole = torch.zeros(3) if like is None else like.detach().clone()
    if dice.random() < 0.5 and whole.numel() and whole.is_floating_point():  # one number of it
        whole.view(-1)[dice.randrange(whole.numel())] = dice.choice((math.nan, math.inf, -math.inf, 1e38, -1e31, 1e20))
        return whole
    makers = (
        lambda: torch.empty(0),
        lambda: torch.tensor(1.0),
        lambda: torch.zeros(7),
        lambda: whole.reshape(1, *whole.shape),
        lambda: whole.reshape(-1)[:-1].clone(),
        whole.double,
        lambda: whole.float().requires_grad_(),
        whole.half,
        whole.long,
        whole.bool,
        lambda: torch.full_like(whole, -1),
        lambda: whole + 1e30 if whole.is_floating_point() else whole.int() - 2,
    )
    return dice.choice(makers)()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything in a message, but for what lies deeper than in any: it may be too deep to walk."""
    if path:
        yield path
    if len(path) > DEEPEST:
        return
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from places(entry, (*path, index))


def changed(value: Any, path: tuple[Any, ...], other: Any, gone: bool = False) -> Any:
    """A copy with something else in one place, or without it."""
    key, rest = path[0], path[1:]
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    if rest:
        copy[key] = changed(copy[key], rest, other, gone)
    elif gone:
        del copy[key]
    else:
        copy[key] = other
    return tuple(copy) if isinstance(value, tuple) else copy


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """What lies at a place."""
    for key in path:
        value = value[key]
    return value


def mutated(dice: random.Random, message: dict[str, Any]) -> dict[str, Any]:
    """A message with one to three things wrong, or right by chance."""
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        ways = list(places(message))
        if not ways:
            return message
        # Each field of the message is as likely as another, however much lies in it.
        first = dice.choice([way[0] for way in ways])
        path = dice.choice([way for way in ways if way[0] == first])
        found, kind = at(message, path), dice.random()
        if kind < 0.1:
            message = changed(message, path, None, gone=True)
        elif kind < 0.15:
            message = {**message, dice.choice(("more", "client_id ", "self", "__class__")): 1}
        elif isinstance(found, Tensor) and kind < 0.75:
            message = changed(message, path, tensor(dice, found))
        elif kind < 0.6:
            message = changed(message, path, dice.choice(NUMBERS))
        elif kind < 0.75:
            message = changed(message, path, dice.choice(TEXTS))
        elif kind < 0.9:
            message = changed(message, path, collection(dice))
        else:
            message = changed(message, path, tensor(dice))
    return message


def damaged(dice: random.Random, data: bytes) -> bytes:
    """Bytes that a network, or somebody on it, has changed."""
    if dice.random() < 0.3:
        return data[: dice.randrange(len(data) + 1)]
    copy = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 8))):
        copy[dice.randrange(len(copy))] = dice.randrange(256)
    return bytes(copy)


@contextmanager
def nothing_unpickled() -> Iterator[None]:
    """Fails where something is unpickled, and where the process grows by more than :data:`MEGABYTES`."""
    load, before = torch.load, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def weights_only(*args: Any, **options: Any) -> Any:
        assert options.get("weights_only"), "torch.load without weights_only"
        return load(*args, **options)

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("something was unpickled")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("loads", "load", "Unpickler"):
            patch.setattr(pickle, name, refuse)
        patch.setattr(torch, "load", weights_only)
        yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MEGABYTES, f"the process grew by {grown:.0f} MB"
