# SPDX-License-Identifier: Apache-2.0
"""Memory that the process keeps, so that a timing does not include the system's supply of fresh pages."""

from __future__ import annotations

from fl_lightning.clients.workers import process


def keep_freed_memory() -> str:
    """As in worker processes; says in words what holds now."""
    if process.keep_freed_memory():
        return "glibc keeps what is freed, so that outputs lie in memory that was used before"
    return "as the C library has it"
