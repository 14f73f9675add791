# SPDX-License-Identifier: Apache-2.0
"""Plants the faults of tests/mutations in the kernels, one at a time in a copy of the tree: which test notices each?

``python tests/mutate.py`` goes on where the last run stopped: faults that the table says are noticed are left out.
CONTRIBUTING.md, "Mutations", says more.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import lightning.pytorch  # noqa: F401
import pytest
import torchmetrics  # noqa: F401
from mutations.change import Mutation, NoLongerAppliesError
from mutations.lists import LISTS
from simt import simt_build

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "mutations" / "table.md"
ALL = [mutation for listed in LISTS.values() for mutation in listed]
LIMIT = 300  # seconds; a fault that makes tests hang counts as noticed
KILLED, SURVIVED, UNSEEN = "noticed by ", "**survives**", "cannot be noticed: "
# What setup.py does where no CUDA is found.
BUILD = """
import sys, setup
def refuse(*_): raise setup.CannotBuildError("left out")
setup.find_cuda, sys.argv = refuse, ["setup.py", "build_ext", "--inplace"]
setup.setup(**setup.extension(), long_description="", long_description_content_type="text/markdown")
"""


class FailedError(Exception):
    """A run cannot go on."""


class Scratch:
    """A copy of the tree in which faults are planted.

    Args:
        folder: where it lies; objects of an earlier run are used again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._simt, self._objects = folder / "build" / "simt", dict[str, Path]()
        self._passed: set[str] = set()
        self._stale = False  # the kernels for the processor still have a fault that is no longer in their sources
        (folder / "build").mkdir(parents=True, exist_ok=True)
        names = run(["git", "ls-files", "-zco", "--exclude-standard"], ROOT).stdout.split("\0")[:-1]
        for path in filter(Path.is_file, folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if name not in names and not name.startswith("build/") and path.suffix not in (".pyc", ".so"):
                path.unlink()
        for name in names:
            source, target = ROOT / name, folder / name
            if source.is_file() and not (target.is_file() and target.read_bytes() == source.read_bytes()):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())  # with a date of now: what was built from it is out of date
        self._build()
        loaded = self._python("-c", "from fl_lightning.ops import _library; print(_library.EXTENSION.module.__file__)")
        if not loaded.stdout.startswith(str(folder)):
            raise FailedError(f"tests would not load the kernels of {folder}: {loaded.stdout}{loaded.stderr}")

    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where pip puts ninja
        own = {
            "PYTHONPATH": str(self.folder),
            "FL_LIGHTNING_SIMT": str(self._simt),
            "OMP_NUM_THREADS": "1",
            "DEBUG": "1",
        }
        return {**os.environ, "PATH": path, **own}

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run([sys.executable, *arguments], self.folder, self._environment())

    def _pytest(self, tests: str) -> tuple[int | None, str]:
        """Runs tests in a copy of this process, which has imported what takes long: exit status and output."""
        report = self.folder / "build" / "pytest.txt"
        child = os.fork()
        if child == 0:
            self._run_here(tests, report)
        until = time.monotonic() + LIMIT
        ended, status = 0, 0
        while not ended and time.monotonic() < until:
            time.sleep(0.1)
            ended, status = os.waitpid(child, os.WNOHANG)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what the tests have started, too
        if not ended:
            os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status) if ended else None, report.read_text(errors="replace")

    def _run_here(self, tests: str, report: Path) -> NoReturn:
        code = 1
        try:
            os.setsid()
            with report.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.chdir(self.folder)
            os.environ.update(self._environment())
            own = (str(ROOT), str(ROOT / "tests"))
            sys.path[:] = [str(self.folder), *(path for path in sys.path if path not in own)]
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *shlex.split(tests)])
        except BaseException:
            traceback.print_exc()
        finally:  # whatever happens: two processes must not plant faults in one folder
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _build(self) -> None:
        """Brings csrc/cpu up to date: only what has changed is compiled."""
        built, self._stale = self._python("-c", BUILD), False
        if built.returncode != 0:
            raise FailedError(f"does not build: {built.stdout[-2000:]}{built.stderr[-2000:]}")

    def _link_cuda(self, rebuilt: str) -> None:
        """Puts a library of the CUDA kernels together, of which one source is compiled anew."""
        (source,) = (self.folder / "csrc" / "cuda").rglob(f"{rebuilt}.cu")
        simt_build.relink(source, self._objects, self._simt / "mutant", self._simt / "kernels.so")

    def _failure(self, tests: str) -> str | None:
        """The first test that fails; ``None`` if all pass."""
        status, output = self._pytest(tests)
        if status is None:
            return f"the limit of {LIMIT} s"
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        if status > 0 and found is None:
            raise FailedError(f"pytest {tests} ran no tests: {output[-2000:]}")
        return None if status == 0 else found[1] if found else f"signal {-status}"

    def judge(self, mutation: Mutation) -> str:
        """Plants one fault, and says what came of it.

        Raises:
            FailedError: tests fail without a fault, or the fault does not compile.
        """
        if mutation.rebuilt and not self._objects:
            self._simt.mkdir(parents=True, exist_ok=True)
            sources = simt_build.sources(self.folder / "csrc" / "cuda")
            self._objects = simt_build.compile_all(sources, self._simt, os.cpu_count() or 1)
        compiled = not mutation.rebuilt
        if self._stale and not (compiled and mutation.tests in self._passed):
            self._build()
        if mutation.tests not in self._passed:
            if mutation.rebuilt:
                self._link_cuda(mutation.rebuilt)
            failure = self._failure(mutation.tests)
            if failure is not None:
                raise FailedError(f"{failure} fails without a fault")
            self._passed.add(mutation.tests)
        try:
            before = mutation.apply(self.folder)
        except NoLongerAppliesError:
            return "**no longer applies**"
        try:
            if mutation.rebuilt:
                self._link_cuda(mutation.rebuilt)
            elif compiled:
                self._build()
                self._stale = True
            failure = self._failure(mutation.tests)
        finally:
            (self.folder / mutation.file).write_text(before, encoding="utf-8")
        if failure is not None:
            return KILLED + failure
        return UNSEEN + mutation.unseen if mutation.unseen else SURVIVED


def run(
    command: list[str], folder: Path, environment: dict[str, str] | None = None
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


def read_table() -> dict[str, str]:
    """What came of each mutation, by its name."""
    lines = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []
    rows = [line.strip("| ").rsplit(" | ", 1) for line in lines if line.startswith("| `")]
    return {row[0]: row[1] for row in rows}


def write_table(results: dict[str, str]) -> str:
    """Writes the table, and returns its line of counts."""
    listed = [(mutation.name, results.get(mutation.name, "not run")) for mutation in ALL]
    kinds = {kind: sum(result.startswith(kind) for _, result in listed) for kind in (KILLED, SURVIVED, UNSEEN)}
    counts = (
        f"{len(listed)} faults: {kinds[KILLED]} noticed, {kinds[SURVIVED]} survive, {kinds[UNSEEN]} cannot be noticed, "
        f"{len(listed) - sum(kinds.values())} not run."
    )
    rows = "".join(f"| {name} | {result} |\n" for name, result in listed)
    TABLE.write_text(
        f"# Mutations\n\n{counts} `python tests/mutate.py` writes this table.\n\n"
        f"| File | What goes wrong | Result |\n|---|---|---|\n{rows}",
        encoding="utf-8",
    )
    return counts


def main() -> int:
    """Exit status 0 if every mutation that was asked for is noticed, 1 if one is not, 2 if a run cannot go on."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="mutations whose list, file or meaning holds this text")
    parser.add_argument("--rerun", action="store_true", help="also those that the table says are noticed")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "mutations", help="folder of the copy")
    options = parser.parse_args()
    results = read_table()
    wanted = [m for name, listed in LISTS.items() for m in listed if options.only in f"{name} {m.name}"]
    if not options.rerun:
        wanted = [m for m in wanted if not results.get(m.name, "").startswith((KILLED, UNSEEN))]
    try:
        scratch = Scratch(options.scratch.resolve()) if wanted else None
        for mutation in wanted:
            assert scratch is not None
            results[mutation.name] = scratch.judge(mutation)
            write_table({**read_table(), mutation.name: results[mutation.name]})  # another run may have written
            print(f"{mutation.name} | {results[mutation.name]}", flush=True)
    except FailedError as error:
        print(error, file=sys.stderr)
        return 2
    print(write_table(read_table()))
    return int(any(not results[m.name].startswith((KILLED, UNSEEN)) for m in wanted))


if __name__ == "__main__":
    sys.exit(main())
