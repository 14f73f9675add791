# SPDX-License-Identifier: Apache-2.0
"""What tests of worker processes share: two workers, and that none is left behind."""

import os
import sys
from pathlib import Path

import pytest
import torch

import fl_lightning as fl

TWO = fl.executors.Parallel(workers=2)
FORKS = [
    pytest.mark.skipif(sys.platform != "linux", reason="workers are made by fork"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a process that may have used a GPU cannot be copied"),
    pytest.mark.usefixtures("no_process_is_left"),
]


others: list[int] = []  # children when the test began, such as multiprocessing's resource tracker


def worker_ids() -> list[int]:
    """Ids of the processes that the test has started and that still are."""
    return [pid for pid in children() if pid not in others]


def children() -> list[int]:
    """Ids of processes that were started here and still are, ended ones that nobody waited for included.

    Those in which torch compiles stay until Python ends.
    """
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    started = map(int, path.read_text().split()) if path.exists() else ()
    return sorted(pid for pid in started if not compiles(pid))


def compiles(pid: int) -> bool:
    """Whether a process is one of the pool of torch.compile."""
    try:
        return b"compile_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return False
