# SPDX-License-Identifier: Apache-2.0
"""Programs in copies of a process that has imported torch: a new process takes seconds for that."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from stat import S_ISFIFO
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]


class Copied(subprocess.Popen[str]):
    """Stands for a Popen of ``[python, FILE, ...]``, ``[python, "-m", MODULE, ...]`` or ``[python, "-c", CODE, ...]``.

    The program runs as it would there, but what this process has imported is there already.

    Attributes:
        also_what_it_starts: processes that the program starts are copies as well.
    """

    also_what_it_starts = True

    def __init__(self, args: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> None:
        # Files and folder are in place when this function is called, in the copy, which it never leaves.
        super().__init__(args, env=env, preexec_fn=partial(self._run, args, env), restore_signals=False, **options)  # type: ignore[arg-type]

    def begins(self) -> None:
        """Runs in the copy before the program, whose arguments are in ``sys.argv``."""

    def _run(self, command: Sequence[str], environment: Mapping[str, str] | None) -> None:
        _close_pipes()
        gc.freeze()  # else the first collections go through all that was there
        gc.enable()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = 1
        try:
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            logging.getLogger("lightning.pytorch").handlers = [logging.StreamHandler()]
            if environment is not None:
                os.environ.clear()
                os.environ.update(environment)
            if self.also_what_it_starts:
                subprocess.Popen = type(self)  # type: ignore[misc]
            atexit._clear()
            warnings.resetwarnings()
            warnings.simplefilter("ignore")  # pytest makes errors of them
            _run_python(list(command[1:]), self.begins)
            code = 0
        except SystemExit as ended:
            code = _status(ended)
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(code)


def _close_pipes() -> None:
    """Whoever reads a pipe waits until nobody has its other end, which a copy would otherwise keep."""
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # of the listing itself
            if number > 2 and S_ISFIFO(os.fstat(number).st_mode):
                os.close(number)


def _run_python(arguments: list[str], begins: Callable[[], None]) -> None:
    """What Python does with these arguments."""
    while arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        arguments.pop(0)
    kind = arguments.pop(0) if arguments[0] in ("-c", "-m") else None
    what, sys.argv = arguments[0], arguments
    first = os.getcwd() if kind else str(Path(what).parent.absolute())
    sys.path[:0] = first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    begins()
    if kind == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(what, run_name="__main__")


def _status(ended: SystemExit) -> int:
    if isinstance(ended.code, str):
        print(ended.code, file=sys.stderr)
    return ended.code if isinstance(ended.code, int) else int(ended.code is not None)


def ran(*arguments: str, cwd: Path | None = None) -> str:
    """What ``python ARGUMENTS`` prints, which must end well."""
    command = [sys.executable, *arguments]
    with Copied(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        said, _ = program.communicate()
    assert program.returncode == 0, said
    return said


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@contextmanager
def interpreters() -> Iterator[Run]:
    """Gives ``run(code, cwd=None, path=(ROOT,), **environment)``: code in an interpreter with what is imported here.

    Each is a copy of a copy of this process, made here. ``path`` comes before all others of modules.
    """
    clean = {name: value for name, value in os.environ.items() if name not in ("FL_LIGHTNING_TREE", "PYTHONPATH")}
    command = [sys.executable, "-c", "import copies; copies.serve()"]
    pipe = subprocess.PIPE
    with TemporaryDirectory() as own, Interpreter(command, clean, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        asked, said = server.stdin, server.stdout

        def run(code: str, cwd: Path | None = None, path: tuple[Path, ...] = (ROOT,), **more: str) -> Any:
            files = [f"{own}/{name}" for name in ("out", "err")]
            environment = {**clean, "PYTHONPATH": os.pathsep.join(map(str, path)), **more}
            print(json.dumps([code, str(cwd or own), environment, files]), file=asked, flush=True)
            status = int(said.readline())
            return subprocess.CompletedProcess(code, status, *(Path(file).read_text("utf-8") for file in files))

        yield run
        asked.close()


def serve() -> None:
    """Answers with a status for every program."""
    del sys.modules["conftest"]  # a program may have one of its own
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "tests"))]
    for line in sys.stdin:
        assert not {"fl_lightning", "pytorch_lightning", "jsonargparse"} & set(sys.modules), "imported too early"
        code, folder, environment, files = json.loads(line)
        with open(files[0], "w") as out, open(files[1], "w") as err:
            command = [sys.executable, "-c", code]
            program = Interpreter(command, environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        print(program.wait(), flush=True)


class Interpreter(Copied):
    """What it starts begins from nothing: it may be anything."""

    also_what_it_starts = False
