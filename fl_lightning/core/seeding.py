# SPDX-License-Identifier: Apache-2.0
"""Random numbers that depend only on the seed, the round and the client, not on what ran before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """Hashes parts, ``(seed, "client", round, client_id)`` for instance, to 63 bits, the same on every machine."""
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
    """Runs the body with all generators of the CPU and the device seeded, and gives them their states back."""
    python, numpy, cpu = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    on_device = _device_state(device)
    seed_all(seed, device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if on_device is not None:
            if device.type == "cuda":
                torch.cuda.set_rng_state(on_device, device)
            else:
                torch.mps.set_rng_state(on_device)


def _device_state(device: torch.device) -> torch.Tensor | None:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else None
