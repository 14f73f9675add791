# SPDX-License-Identifier: Apache-2.0
"""Mutants of the package's Python files, made by mutmut's operators: which of them does no test notice?

``make mutants FILES=fl_lightning/algorithms/fedfv.py``; without ``FILES`` a random 2 % of all mutants of the package.

The tests of ``fl_lightning/ROOM/FILE.py`` are ``tests/ROOM/test_FILE*.py``. What these do not notice meets a second
circle: the same tests of all files that import FILE, and those of ``tests/ROOM`` that name one of its classes or
functions. If there are none at all, all tests of ``tests/ROOM`` decide. ``tests/project/test_public_api.py``, which
knows all defaults of public names, comes last.
"""

from __future__ import annotations

import argparse
import difflib
import random
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

import libcst as cst
import libcst.matchers as m
import lightning.pytorch  # noqa: F401
import torchmetrics  # noqa: F401
from mutmut.mutation.mutators import mutation_operators
from scratch import ROOT, FailedError, Scratch

EQUIVALENT = ROOT / "tests" / "survivors.txt"
SHARE = 0.02
GUARDS = re.compile(r",\s*(strict=\w+)?\)")  # of zip: raises where this package has a fault already


@dataclass(frozen=True)
class Mutant:
    """A file with one small change."""

    file: str
    module: cst.Module
    node: cst.CSTNode
    changed: cst.CSTNode

    @property
    def code(self) -> str:
        """The whole file."""
        return self.module.deep_replace(self.node, self.changed).code  # type: ignore[arg-type]

    @property
    def is_guard(self) -> bool:
        """Whether nothing but a guard changed."""
        return GUARDS.sub(")", self.code) == GUARDS.sub(")", self.module.code)

    @property
    def difference(self) -> str:
        """The lines that differ, below the name of the file."""
        before, after = self.module.code.splitlines(), self.code.splitlines()
        lines = difflib.unified_diff(before, after, self.file, n=0, lineterm="")
        return "".join(f"{line}\n" for line in lines if not line.startswith(("+++", "@@")))


def mutants(root: Path, file: str) -> Iterator[Mutant]:
    """All of one file."""
    module = cst.parse_module((root / file).read_text(encoding="utf-8"))
    for node in _nodes(module):
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                # Of a string one is enough: others only change its case.
                for changed in list(operator(node))[: 1 if kind is cst.BaseString else None]:
                    yield Mutant(file, module, node, changed)


def _nodes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """What may be changed: neither types nor messages nor prose."""
    if m.matches(node, m.Annotation() | m.Raise() | m.AnnAssign(annotation=m.Annotation(m.Name("TypeAlias")))):
        return
    if isinstance(node, cst.SimpleString) and " " in node.value:
        return
    yield node
    for child in node.children:
        yield from _nodes(child)


def circles(root: Path, file: str) -> list[list[str]]:
    """The tests of a file, as above."""
    package, *rooms, name = Path(file).parts
    folder = root.joinpath("tests", *rooms)
    own = set(folder.glob(f"test_{Path(name).stem}*.py"))
    names = re.findall(r"^(?:class|def) ([a-zA-Z]\w*)", (root / file).read_text(encoding="utf-8"), re.MULTILINE)
    near = {test for test in folder.glob("test_*.py") if _names(test, names)}
    for other in (root / package).rglob("*.py"):
        if _names(other, [file.removesuffix(".py").replace("/", ".")]):
            near.update((root / "tests" / other.relative_to(root / package).parent).glob(f"test_{other.stem}*.py"))
    found = [sorted(str(test.relative_to(root)) for test in circle) for circle in (own, near - own) if circle]
    public = "tests/project/test_public_api.py"
    return (found or [[str(folder.relative_to(root))]]) + [[public]] * (root / public).is_file()


def _names(file: Path, words: list[str]) -> bool:
    text = file.read_text(encoding="utf-8")
    return any(re.search(rf"\b{re.escape(word)}\b", text) for word in words)


class Judge:
    """Runs the tests of mutants in a copy of the tree."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._scratch = Scratch(root, folder, {})
        for built in root.glob("fl_lightning/_[Cb]*.*[ot]"):  # the kernels, and what they were built for
            (folder / "fl_lightning" / built.name).write_bytes(built.read_bytes())
        self._limits: dict[tuple[str, ...], float] = {}

    def notices(self, mutant: Mutant) -> bool:
        """Whether a test fails or hangs with the mutant."""
        return any(self._fails(mutant, tests) for tests in circles(self._scratch.root, mutant.file))

    def _fails(self, mutant: Mutant, tests: list[str]) -> bool:
        arguments = ("-m", "not slow", *tests)
        if arguments not in self._limits:
            began = time.monotonic()
            status, output = self._scratch.pytest(*arguments)
            if status != 0:
                raise FailedError(f"the tests fail without a mutant: {' '.join(arguments)}\n{output[-2000:]}")
            self._limits[arguments] = 3 * (time.monotonic() - began) + 10
        try:
            self._write(mutant.file, mutant.code)
            return self._scratch.pytest(*arguments, limit=self._limits[arguments])[0] != 0
        finally:
            self._write(mutant.file, mutant.module.code)

    def _write(self, file: str, code: str) -> None:
        path = self._scratch.folder / file
        path.write_text(code, encoding="utf-8")
        Path(cache_from_source(str(path))).unlink(missing_ok=True)  # which may look as new and as long as the code


def main() -> int:
    """Exit status 0 if every mutant is noticed or known to be equivalent, 1 if one is not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", help=f"without them a random {SHARE:.0%} of all mutants")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of what is drawn")
    options = parser.parse_args()
    package = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("fl_lightning/**/*.py") if p.stem != "__init__")
    found = [mutant for file in options.files or package for mutant in mutants(ROOT, file)]
    if not options.files:
        print(f"--seed {options.seed}")
        found = random.Random(options.seed).sample(found, round(len(found) * SHARE))
    known, survivors, judge = EQUIVALENT.read_text(encoding="utf-8"), 0, Judge(ROOT, ROOT / "build" / "mutants")
    for mutant in found:
        if not mutant.is_guard and mutant.difference not in known and not judge.notices(mutant):
            survivors += 1
            print(mutant.difference, end="", flush=True)
    print(f"{survivors} of {len(found)} survive")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
