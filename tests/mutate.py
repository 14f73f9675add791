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
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401
import torchmetrics  # noqa: F401
from mutations.change import Mutation, NoLongerAppliesError
from mutations.lists import LISTS
from scratch import LIMIT, ROOT, FailedError, Scratch
from simt import simt_build

TABLE = ROOT / "tests" / "mutations" / "table.md"
ALL = [mutation for listed in LISTS.values() for mutation in listed]
KILLED, SURVIVED, UNSEEN = "noticed by ", "**survives**", "cannot be noticed: "
# What setup.py does where no CUDA is found.
BUILD = """
import sys, setup
def refuse(*_): raise setup.CannotBuildError("left out")
setup.find_cuda, sys.argv = refuse, ["setup.py", "build_ext", "--inplace"]
setup.setup(**setup.extension(), long_description="", long_description_content_type="text/markdown")
"""


class Kernels(Scratch):
    """A copy of the tree in which faults of the kernels are planted; objects of an earlier run are used again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(ROOT, folder, {"FL_LIGHTNING_SIMT": str(folder / "build" / "simt"), "DEBUG": "1"})
        self._simt, self._objects = folder / "build" / "simt", dict[str, Path]()
        self._passed: set[str] = set()
        self._stale = False  # the kernels for the processor still have a fault that is no longer in their sources
        self._build()
        loaded = self.python("-c", "from fl_lightning.ops import _library; print(_library.EXTENSION.module.__file__)")
        if not loaded.stdout.startswith(str(folder)):
            raise FailedError(f"tests would not load the kernels of {folder}: {loaded.stdout}{loaded.stderr}")

    def _build(self) -> None:
        """Brings csrc/cpu up to date: only what has changed is compiled."""
        built, self._stale = self.python("-c", BUILD), False
        if built.returncode != 0:
            raise FailedError(f"does not build: {built.stdout[-2000:]}{built.stderr[-2000:]}")

    def _link_cuda(self, rebuilt: str) -> None:
        """Puts a library of the CUDA kernels together, of which one source is compiled anew."""
        (source,) = (self.folder / "csrc" / "cuda").rglob(f"{rebuilt}.cu")
        simt_build.relink(source, self._objects, self._simt / "mutant", self._simt / "kernels.so")

    def _failure(self, tests: str) -> str | None:
        """The first test that fails; ``None`` if all pass."""
        status, output = self.pytest(*shlex.split(tests))
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
        scratch = Kernels(options.scratch.resolve()) if wanted else None
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
