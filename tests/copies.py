# SPDX-License-Identifier: Apache-2.0
"""Programs in copies of this process, which has imported torch and Lightning: a new process takes seconds for that."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from process_families import free_port


class Copies:
    """Stands for :class:`subprocess.Popen` with ``[python, "-m", MODULE, ...]``: runs the module's ``main``.

    Of ``[python, "-m", "torch.distributed.run", ..., "-m", MODULE, ...]`` it runs as many copies as that would start,
    and they find each other as they would then.

    Attributes:
        stdin: of the first copy, as text; the others have none.
        stdout: what all of them print.
        returncode: of the first copy that failed; 0 if none did.
    """

    _ends: ClassVar[set[int]] = (
        set()
    )  # this process's ends of pipes, which copies close: else nobody would see them end

    def __init__(
        self, command: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None, **files: Any
    ) -> None:
        module, *arguments = command[len(command) - list(reversed(command)).index("-m") :]
        number = next((int(each.partition("=")[2]) for each in command if each.startswith("--nproc-per-node=")), 1)
        shared = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        own = [{**shared, "RANK": str(k), "LOCAL_RANK": str(k), "GROUP_RANK": "0"} for k in range(number)]
        ranks = [{**rank, "TORCHELASTIC_RUN_ID": "copies"} for rank in own] if number > 1 else [{}]

        def run() -> None:
            if cwd is not None:
                os.chdir(cwd)
            sys.argv = [module, *arguments]
            importlib.import_module(module).main()

        into, self._into = os.pipe()
        self._out, out = os.pipe()
        Copies._ends |= {self._into, self._out}
        error = files.get("stderr")
        streams = [into, out, out if error in (None, subprocess.STDOUT) else error.fileno()]
        self._copies = [_copy(run, streams, {**(env or {}), **rank}, Copies._ends) for rank in ranks]
        os.close(into)
        os.close(out)
        self.stdin, self.stdout = os.fdopen(self._into, "w"), os.fdopen(self._out)
        self.returncode: int | None = None

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What is still printed; the test's own time limit counts."""
        Copies._ends.discard(self._into)
        self.stdin.close()
        said = self.stdout.read()
        Copies._ends.discard(self._out)
        self.stdout.close()
        self.wait()
        return said, None

    def wait(self) -> int:
        """Until all have ended."""
        if self.returncode is None:
            statuses = [os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) for copy in self._copies]
            self.returncode = next(filter(None, statuses), 0)
        return self.returncode

    def kill(self) -> None:
        """SIGKILL for all."""
        for copy in self._copies:
            os.kill(copy, 9)


def ran(module: str, *arguments: str) -> str:
    """What a program prints that must end well."""
    program = Copies([sys.executable, "-m", module, *arguments])
    said, _ = program.communicate()
    assert program.returncode == 0, said
    return said


def copy_of(run: Callable[[], object], file: Path) -> int:
    """The number of a copy of this process that runs this and writes what is printed into a file."""
    with file.open("wb") as output, open(os.devnull, "rb") as nothing:
        return _copy(run, [nothing.fileno(), output.fileno(), output.fileno()], {}, Copies._ends)


def _copy(run: Callable[[], object], streams: Sequence[int], environment: Mapping[str, str], ends: set[int]) -> int:
    copy = os.fork()
    if copy:
        return copy
    code = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        for end in {*ends, *streams} - {0, 1, 2}:
            os.close(end)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.update(environment)
        warnings.resetwarnings()
        warnings.simplefilter("ignore")  # pytest makes errors of them
        run()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
