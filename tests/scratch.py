# SPDX-License-Identifier: Apache-2.0
"""A copy of the tree in which faults are planted, and its tests, run in copies of this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 300  # seconds; a fault that makes tests hang counts as noticed


class FailedError(Exception):
    """A run cannot go on."""


class Scratch:
    """A copy of the tree.

    Args:
        root: what is copied: the files that git does not ignore.
        folder: where the copy lies; what an earlier run has left there under ``build`` is used again.
        environment: variables for what runs there.
    """

    def __init__(self, root: Path, folder: Path, environment: Mapping[str, str]) -> None:
        self.root, self.folder = root, folder
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where pip puts ninja
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        self.environment.update(environment)
        (folder / "build").mkdir(parents=True, exist_ok=True)
        names = run(["git", "ls-files", "-zco", "--exclude-standard"], root).stdout.split("\0")[:-1]
        for left in filter(Path.is_file, folder.rglob("*")):
            name = left.relative_to(folder).as_posix()
            if name not in names and not name.startswith("build/") and left.suffix not in (".pyc", ".so"):
                left.unlink()
        for name in names:
            source, target = root / name, folder / name
            if source.is_file() and not (target.is_file() and target.read_bytes() == source.read_bytes()):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())  # with a date of now: what was built from it is out of date

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs Python in the copy."""
        return run([sys.executable, *arguments], self.folder, self.environment)

    def pytest(self, *arguments: str, limit: float = LIMIT) -> tuple[int | None, str]:
        """Runs tests in a copy of this process, which has imported what takes long.

        Returns:
            The exit status, ``None`` if the tests took longer than the limit, and the output.
        """
        report = self.folder / "build" / "pytest.txt"
        child = os.fork()
        if child == 0:
            self._run_here(arguments, report)
        ended, status, until = 0, 0, time.monotonic() + limit
        try:
            while not ended and time.monotonic() < until:
                time.sleep(0.05)
                ended, status = os.waitpid(child, os.WNOHANG)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what the tests have started, too
            if not ended:
                os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status) if ended else None, report.read_text(errors="replace")

    def _run_here(self, arguments: tuple[str, ...], report: Path) -> NoReturn:
        code = 1
        try:
            os.setsid()
            with report.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.chdir(self.folder)
            os.environ.update(self.environment)
            own = (str(self.root), str(self.root / "tests"))
            sys.path[:] = [str(self.folder), *(path for path in sys.path if path not in own)]
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments])
        except BaseException:
            traceback.print_exc()
        finally:  # whatever happens: two processes must not plant faults in one folder
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def run(
    command: list[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command; the caller looks at its exit status."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        start_new_session=True,
    )
