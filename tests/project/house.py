# SPDX-License-Identifier: Apache-2.0
"""The package's rooms and the imports between them, for types alone as well."""

from __future__ import annotations

import ast
from functools import cache
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
