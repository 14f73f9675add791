# SPDX-License-Identifier: Apache-2.0
"""Random numbers that depend on who draws them and when, never on what ran before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """Hashes the parts to a 63-bit seed; the same parts give the same seed on every machine and Python.

    Args:
        *parts: what the draw belongs to, for instance ``(seed, "client", round, client_id)``.

    Returns:
        An integer in ``[0, 2**63)``.
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_all(seed: int) -> None:
    """Seeds torch (every device), numpy's global generator and Python's ``random``."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def isolated(seed: int, device: torch.device) -> Iterator[None]:
    """Runs the body with all generators seeded, and gives the outer ones their states back.

    Args:
        seed: seed for torch, numpy and Python.
        device: the device whose generator is saved besides the CPU's.
    """
    python, numpy_state, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    accelerator = getattr(torch, device.type) if device.type in ("cuda", "mps") else None
    on_device = None
    if accelerator is not None:
        on_device = accelerator.get_rng_state(device) if device.type == "cuda" else accelerator.get_rng_state()
    seed_all(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        if accelerator is not None and on_device is not None:
            if device.type == "cuda":
                accelerator.set_rng_state(on_device, device)
            else:
                accelerator.set_rng_state(on_device)
