# SPDX-License-Identifier: Apache-2.0
"""Memory that a process keeps when it is freed: fresh pages cost a convolutional network a quarter of its time."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of malloc.h


def keep_freed_memory() -> bool:
    """Lets glibc reuse large blocks, where by default each is given back to the system and faulted in anew.

    The environment variables MALLOC_MMAP_MAX_=0 and MALLOC_TRIM_THRESHOLD_=2147483647 do the same from outside.

    Returns:
        Whether this holds now; on another C library nothing changes.
    """
    try:
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
    except OSError:
        library = None
    if library is None or not hasattr(library, "gnu_get_libc_version"):
        return False
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    return True
