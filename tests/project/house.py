# SPDX-License-Identifier: Apache-2.0
"""The package's rooms and the imports between them, for types alone as well.

python tests/project/house.py [CHECKOUT]     prints rooms, floors, arrows and circles
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path


def modules(package: Path) -> dict[str, Path]:
    """The package's modules by name; a folder's own is called ``folder.__init__``."""
    return {".".join(p.relative_to(package.parent).with_suffix("").parts): p for p in package.rglob("*.py")}


@cache
def syntax(path: Path) -> ast.Module:
    """A module as a tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(module: str, known: dict[str, Path]) -> set[str]:
    """The known modules that a module imports."""
    names = []
    for node in ast.walk(syntax(known[module])):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            names += [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [(alias.name,) for alias in node.names]
    found = [[f"{name}{end}" for name in some for end in ("", ".__init__")] for some in names]
    return {next((name for name in some if name in known), module) for some in found} - {module}


def room(module: str) -> str:
    """The folder or file directly under the package."""
    return module.split(".")[1]


def height(name: str, arrows: dict[str, set[str]], below: tuple[str, ...] = ()) -> int:
    """The longest chain of imports below a room, circles cut."""
    return 1 + max((height(n, arrows, (*below, name)) for n in arrows[name] if n not in (*below, name)), default=0)


def main(checkout: Path) -> None:
    known = modules(checkout / "fl_lightning")
    files = {module: imports(module, known) for module in known}
    arrows: dict[str, set[str]] = {room(module): set() for module in known}
    for module, found in files.items():
        arrows[room(module)] |= {room(other) for other in found} - {room(module)}
    flat = len([name for name in arrows if (checkout / "fl_lightning" / f"{name}.py").exists()])
    floors = max(height(name, arrows) for name in arrows)
    try:
        TopologicalSorter({m: found for m, found in files.items() if not m.endswith("__init__")}).prepare()
        circle = "none"
    except CycleError as error:
        circle = " -> ".join(error.args[1])
    print(f"{len(arrows)} rooms ({flat} files), {floors} floors, {sum(map(len, arrows.values()))} arrows")
    print(f"circle of files: {circle}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2])
