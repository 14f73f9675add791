# SPDX-License-Identifier: Apache-2.0
"""What is built for the tests is built once, however many worker processes pytest-xdist runs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder of this name after ``make(folder)``, which the first worker calls while the others wait.

    If it fails, the next worker tries again, so that every worker reports the error.
    """
    base = factory.getbasetemp()
    # Workers have a folder each, beside one another.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / name, shared / f"{name}.done"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        if not done.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            done.touch()
    return folder
