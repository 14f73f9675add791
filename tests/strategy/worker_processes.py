# SPDX-License-Identifier: Apache-2.0
"""Which processes this one has started."""

import os
from pathlib import Path


def children() -> list[int]:
    """Ids of processes that were started here and still are, ended ones that nobody waited for included."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return sorted(int(pid) for pid in path.read_text().split()) if path.exists() else []
