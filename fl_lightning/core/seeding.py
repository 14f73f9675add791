# SPDX-License-Identifier: Apache-2.0
"""Random numbers that depend only on the seed, the round and the client, not on what ran before."""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

_MT19937_BYTES = 624 * 4 + 4
"""numpy's ``mt19937_state``: the key and the position in it."""


def derive_seed(*parts: int | str) -> int:
    """Hashes the parts to a 63-bit seed; the same parts give the same seed on every machine and Python.

    Args:
        *parts: what the draw belongs to, for instance ``(seed, "client", round, client_id)``.

    Returns:
        An integer in ``[0, 2**63)``.
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_all(seed: int, device: torch.device) -> None:
    """Seeds numpy's global generator, Python's ``random``, and torch on the CPU and on ``device``."""
    # Not torch.manual_seed: it also queues a call for every accelerator that is not initialised yet, with a formatted
    # stack trace each time, which costs more than a local step of a small model.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def isolated(seed: int, device: torch.device) -> Iterator[None]:
    """Runs the body with all generators seeded, and gives the outer ones their states back.

    Args:
        seed: seed for torch, numpy and Python.
        device: the device whose generator is seeded besides the CPU's.
    """
    python, cpu = random.getstate(), torch.get_rng_state()
    on_device = _device_state(device)
    with _numpy_set_aside():
        seed_all(seed, device)
        try:
            yield
        finally:
            random.setstate(python)
            torch.set_rng_state(cpu)
            if on_device is not None:
                if device.type == "cuda":
                    torch.cuda.set_rng_state(on_device, device)
                else:
                    torch.mps.set_rng_state(on_device)


_spares: list[np.random.MT19937] = []
"""Generators for the body of :func:`isolated`, as many as were ever nested."""

_plain: tuple[int, bytes] | None = None
"""Address and state of a generator last seen without half of a pair of normal numbers."""


@contextmanager
def _numpy_set_aside() -> Iterator[None]:
    """Puts another generator behind numpy's global functions, and the same one back.

    Reading and writing numpy's state costs more than a local step of a small model, changing the generator next to
    nothing. What changing it loses is the second of a pair of normal numbers, which numpy keeps elsewhere: that is
    asked for only if the generator has drawn since it was last found without one.
    """
    if not hasattr(mtrand, "set_bit_generator"):  # before numpy 1.24
        state = np.random.get_state()
        try:
            yield
        finally:
            np.random.set_state(state)
        return
    outer = mtrand.get_bit_generator()
    kept = _state_with_half_pair(outer)
    spare = _spares.pop() if _spares else np.random.MT19937(0)
    mtrand.set_bit_generator(spare)
    try:
        yield
    finally:
        mtrand.set_bit_generator(outer)
        _spares.append(spare)
        if kept is not None:
            np.random.set_state(kept)


def _state_with_half_pair(generator: np.random.BitGenerator) -> dict[str, Any] | None:
    """The global state if it holds the second of a pair of normal numbers; ``None`` if it does not."""
    global _plain
    mark = None
    if type(generator) is np.random.MT19937:
        address = generator.ctypes.state_address
        mark = (address, ctypes.string_at(address, _MT19937_BYTES))
        if mark == _plain:  # a pair is begun by drawing, and drawing changes the state
            return None
    state: dict[str, Any] = np.random.get_state(legacy=False)
    if state["has_gauss"]:
        return state
    _plain = mark
    return None


def _device_state(device: torch.device) -> torch.Tensor | None:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else None
