# SPDX-License-Identifier: Apache-2.0
"""The package's rooms: imports point down, never in a circle, and one room alone knows the inside of Lightning."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from house import imports, modules, room, syntax

from fl_lightning.lightning import metric_state
from fl_lightning.lightning.loop_parts import CONTRACT

PACKAGE = Path(__file__).parents[2] / "fl_lightning"
FLOORS = (
    ("__init__", "__main__"),
    ("attacks", "callbacks", "executors", "guards", "optim", "solvers", "testing"),
    ("comparison", "federation"),
    ("fit",),
    ("clients",),
    ("algorithms", "data", "report", "client_module"),
    ("lightning",),
    ("core",),
    ("metrics", "ops"),
    ("arguments",),
)
"""From the roof down. A file may import its own room and rooms of lower floors, for types alone as well."""
PRIVATE = {name for names in CONTRACT.values() for name in names if name.startswith("_")} | {*metric_state.CONTRACT}
MODULES = modules(PACKAGE)


@cache
def imported_by(module):
    """What a module of the package imports of it."""
    return imports(module, MODULES)


def test_every_room_has_a_floor():
    assert {room(module) for module in MODULES} == {name for floor in FLOORS for name in floor}


def test_architecture_maps_these_floors():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    mapped = {}
    for floor, cell in re.findall(r"^\| (\d+) \| (.*?) \|", page, flags=re.MULTILINE):
        names = {name.split("/")[0].removesuffix(".py") for name in re.findall("`([^`]+)`", cell)}
        mapped.setdefault(int(floor), set()).update(names)
    assert mapped == {len(FLOORS) - 1 - number: set(floor) for number, floor in enumerate(FLOORS)}


def test_arrows_point_down():
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    arrows = [(a, b) for a in MODULES for b in imported_by(a) if room(a) != room(b)]
    assert [(a, b) for a, b in arrows if floor[room(a)] >= floor[room(b)]] == []


def test_no_file_imports_itself_by_way_of_others():
    files = {module: imported_by(module) for module in MODULES if not module.endswith("__init__")}
    TopologicalSorter(files).prepare()  # raises CycleError, which names the circle


def inside_lightning(tree: ast.AST) -> Iterator[ast.AST]:
    """Imports of Lightning, calls of ``lightning_module()``, and private attributes of objects other than ``self``."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(name)) if re.match(r"(pytorch_)?lightning\b", name):
                yield node
            case ast.Import(names=names) if any(re.match(r"(pytorch_)?lightning\b", alias.name) for alias in names):
                yield node
            case ast.Call(func=ast.Name(id="lightning_module") | ast.Attribute(attr="lightning_module")):
                yield node
            case ast.Attribute(value=owner, attr=name) if name in PRIVATE:
                if not (isinstance(owner, ast.Name) and owner.id == "self"):
                    yield node


def test_the_inside_of_lightning_is_one_rooms_business():
    found = [
        f"{module}: {ast.unparse(node)}"
        for module, path in MODULES.items()
        if room(module) != "lightning" and module != "fl_lightning.metrics.client"
        for node in inside_lightning(syntax(path))
    ]
    assert found == []
