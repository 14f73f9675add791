# SPDX-License-Identifier: Apache-2.0
"""What a check raises."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from fl_lightning.arguments import shown
from fl_lightning.core.seeding import isolated

DECLARE = "declare all that it keeps with server_state, per_client or at_clients"
SEEDED = "draw random numbers from torch.Generator().manual_seed(seed)"

_UNUSUAL = 0x5EED_0F_0123


def require(holds: bool, problem: str) -> None:
    """Raises AssertionError with what is wrong and what to write instead; ``python -O`` leaves out ``assert``."""
    if not holds:
        raise AssertionError(problem)


@contextmanager
def watched_generators(problem: str) -> Iterator[None]:
    """Raises AssertionError if the body changes a generator of torch, NumPy or Python that everybody shares.

    Meanwhile they have a state of their own, which nobody else seeds them with by chance.
    """
    with isolated(_UNUSUAL, torch.device("cpu")):
        before = _states()
        yield
        require(before == _states(), f"{problem}: {SEEDED}")


def _states() -> list[str]:
    return [str(state) for state in (torch.get_rng_state().tolist(), numpy.random.get_state(), random.getstate())]


def refuse_other(make: Callable[[], Any], kinds: tuple[type[Any], ...], words: str) -> None:
    """Raises TypeError if a function makes something else; ``words`` say what it must make."""
    if not isinstance(make(), kinds):
        raise TypeError(f"make must be a class of {words} or a function that makes one, found {shown(make)}")
