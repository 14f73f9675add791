# SPDX-License-Identifier: Apache-2.0
"""A process that ends with the one that has started it. Linux alone can do this; elsewhere nothing happens."""

from __future__ import annotations

import ctypes
import os
import signal

_PDEATHSIG = 1  # of prctl


def end_with_parent(parent: int) -> None:
    """The system kills this process when its parent ends, however that comes about; at once if it has ended."""
    _at_parents_death(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the system was told
        os._exit(1)


def outlive_parent() -> None:
    """From here on this process lives on if its parent ends."""
    _at_parents_death(0)


def _at_parents_death(number: int) -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "prctl"):
        library.prctl(_PDEATHSIG, number)
