# SPDX-License-Identifier: Apache-2.0
"""Processes that a test has started, with their children's children in sessions of their own: found and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

_NAME = "FL_LIGHTNING_TEST_FAMILY"  # an environment variable, which every process hands on


class Family:
    """All processes that were started, by whatever way, from a process with :attr:`env`."""

    def __init__(self) -> None:
        self._entry = f"{_NAME}={uuid4().hex}"
        self._children: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str | Path], env: Mapping[str, str], log: Path, cwd: Path
    ) -> subprocess.Popen[bytes]:
        """Starts a process whose output goes to a file."""
        with open(log, "wb") as file:
            child = subprocess.Popen(
                command, env={**env, **self.env}, cwd=cwd, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        self._children.append(child)
        return child

    @property
    def env(self) -> dict[str, str]:
        """To be added to the environment of the first process."""
        return dict([self._entry.split("=")])

    def members(self) -> list[int]:
        """Ids of those that run."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):  # it has ended, or is somebody else's
                    if self._entry.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def descendants(self, process: int) -> set[int]:
        """A process and those among the members that it has started, directly or not."""
        found, before = {process}, 0
        while len(found) > before:
            before = len(found)
            found |= {member for member in self.members() if parent_of(member) in found}
        return found

    def end(self) -> None:
        """SIGKILL for all, and for what they start in the meantime."""
        until(lambda: not [kill(process) for process in self.members()], 30, "processes end")
        for child in self._children:
            child.wait(30)


@contextmanager
def family() -> Iterator[Family]:
    """A family that has ended when the block ends, however it does."""
    made = Family()
    try:
        yield made
    finally:
        made.end()


def kill(process: int) -> None:
    """SIGKILL, unless it has ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def parent_of(process: int) -> int:
    """The id of its parent; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def until(holds: Callable[[], Any], seconds: float, what: str, log: Callable[[], str] = str) -> Any:
    """Waits for something, at most so long, and returns it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = holds()
        if found:
            return found
        time.sleep(0.2)
    raise TimeoutError(f"{what}: not within {seconds} s\n{log()}")


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
