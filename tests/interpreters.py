# SPDX-License-Identifier: Apache-2.0
"""Programs in interpreters that have imported torch and torchmetrics, and neither Lightning nor this package.

Importing these two takes several times as long as everything else that a new interpreter needs, so they are imported
once, in a process of which every program gets a copy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
PROGRAM = "import sys; sys.path.append({!r}); import interpreters; interpreters.serve()"


@dataclass(frozen=True)
class Ended:
    """What a program has left: its status and what it printed."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Ended]


@contextmanager
def interpreters() -> Iterator[Run]:
    """Gives ``run(code, cwd=None, path=(ROOT,), **environment)``: ``path`` comes before all others of modules."""
    clean = {name: value for name, value in os.environ.items() if name not in ("FL_LIGHTNING_TREE", "PYTHONPATH")}
    with TemporaryDirectory() as own, subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(str(Path(__file__).parent))],
        env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None
        asked, said = server.stdin, server.stdout

        def run(code: str, cwd: Path | None = None, path: tuple[Path, ...] = (ROOT,), **environment: str) -> Ended:
            files = [f"{own}/{name}" for name in ("out", "err")]
            question = [code, str(cwd or own), [str(each) for each in path], environment, files]
            print(json.dumps(question), file=asked, flush=True)
            status = int(said.readline())
            return Ended(status, *(Path(file).read_text(encoding="utf-8") for file in files))

        yield run
        asked.close()


def serve() -> None:
    """Answers with a status for every program."""
    import torch  # noqa: F401
    import torchmetrics  # noqa: F401

    assert not {"lightning", "pytorch_lightning", "fl_lightning", "jsonargparse"} & set(sys.modules)
    del sys.modules["interpreters"]
    sys.path.pop()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _live(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _live(code: str, folder: str, path: list[str], environment: dict[str, str], files: list[str]) -> None:
    status = 1
    try:
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        os.environ.update(environment)
        sys.path[1:1] = path
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
