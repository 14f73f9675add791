# SPDX-License-Identifier: Apache-2.0
"""The package's rooms: imports point down, never in a circle, and one room alone knows the inside of Lightning."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from house import imports, modules, room, syntax

from fl_lightning.lightning import metric_state
from fl_lightning.lightning.names import CONTRACT

PACKAGE = Path(__file__).parents[2] / "fl_lightning"
FLOORS = (
    ("__init__", "__main__"),
    ("attacks", "callbacks", "executors", "guards", "optim", "solvers"),
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


def test_contributing_draws_these_floors():
    page = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = page.split("The rooms of `fl_lightning/`:\n\n```\n")[1].split("```")[0].replace(".py", "")
    assert [set(line.split(", ")) for line in drawn.splitlines()] == [set(floor) for floor in FLOORS]


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


@pytest.mark.parametrize(
    "line",
    [
        "from lightning.pytorch import Trainer",
        "import os, lightning.pytorch as pl",
        "from pytorch_lightning.loops import _Loop",
        "x = names.lightning_module('callbacks')",
        "trainer.fit_loop._data_source",
        "getattr(self.trainer, 'x')._data_source",
        "metric._update_count",
    ],
)
def test_the_guard_sees_each_way_in(line):
    assert list(inside_lightning(ast.parse(line))) != []


def test_every_room_says_what_it_is_for():
    texts = {path: ast.get_docstring(syntax(path)) or "" for path in PACKAGE.glob("*/**/__init__.py")}
    assert [str(path.parent) for path, text in texts.items() if "Uses " not in text] == []


def test_rooms_name_the_rooms_that_they_use():
    rooms = {name for floor in FLOORS for name in floor}
    named, used = {}, {}
    for path in PACKAGE.glob("*/__init__.py"):
        said = (ast.get_docstring(syntax(path)) or "").split("Uses ")[1]
        if "every room but" in said or "below" in said:
            continue
        own = path.parent.name
        named[own] = rooms & set(re.findall(r"``(\w+)``", re.split(r"[.;](?:\s|$)", said)[0]))
        files = [module for module in MODULES if room(module) == own]
        used[own] = {room(other) for module in files for other in imported_by(module)} - {own}
    assert len(named) > 8
    assert named == used
