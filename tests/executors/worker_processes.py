# SPDX-License-Identifier: Apache-2.0
"""What tests of worker processes share: two workers, and that none is left behind."""

import os
import sys
from pathlib import Path

import pytest

import fl_lightning as fl

TWO = fl.executors.Parallel(workers=2)
FORKS = [
    pytest.mark.skipif(sys.platform != "linux", reason="workers are made by fork"),
    pytest.mark.usefixtures("no_process_is_left"),
]


others: list[int] = []  # children when the test began, such as multiprocessing's resource tracker


def worker_ids() -> list[int]:
    """Ids of the processes that the test has started and that still are."""
    return [pid for pid in children() if pid not in others]


def children() -> list[int]:
    """Ids of processes that were started here and still are, ended ones that nobody waited for included."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return sorted(int(pid) for pid in path.read_text().split()) if path.exists() else []
