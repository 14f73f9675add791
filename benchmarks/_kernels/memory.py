# SPDX-License-Identifier: Apache-2.0
"""Memory that the process keeps, so that a timing does not include the system's supply of fresh pages."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of malloc.h


def keep_freed_memory() -> str:
    """Lets glibc reuse large blocks, as MALLOC_MMAP_MAX_=0 and MALLOC_TRIM_THRESHOLD_=2147483647; says what holds."""
    try:
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
    except OSError:
        library = None
    if library is None or not hasattr(library, "gnu_get_libc_version"):
        return "as the C library has it"
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    return "glibc keeps what is freed, so that outputs lie in memory that was used before"
