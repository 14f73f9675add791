# SPDX-License-Identifier: Apache-2.0
"""``python -m fl_lightning flower-app DIR``: writes a Flower app that runs; needs no Flower itself."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "flower_app"
"""The app's files, each with ``.txt`` behind its name, so that they are no modules of this package."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")

USAGE = """\
usage: python -m fl_lightning flower-app DIR

Writes an app for Flower into the new folder DIR: task.py (model, data and method, for simulation and deployment
alike), simulate.py, server_app.py, client_app.py, pyproject.toml and a README with all commands."""


def write_app(folder: Path) -> list[Path]:
    """Writes the app into a new or empty folder, whose name becomes the app's and must be one for Flower."""
    name = folder.resolve().name
    if not _NAME.fullmatch(name):
        raise ValueError(
            "the folder's name must begin with a letter and have at most 32 letters, digits and hyphens, because "
            f"Flower takes it for the name of the app, found {name!r}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} must be a new or an empty folder, found something in it")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for source in sorted(SOURCES.glob("*.txt")):
        path = folder / source.stem
        path.write_text(source.read_text(encoding="utf-8").replace("APP_NAME", name), encoding="utf-8")
        written.append(path)
    return written


def run(arguments: Sequence[str]) -> int:
    """Runs the command with what stands behind its name; returns its exit status."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        asked = list(arguments) in (["-h"], ["--help"])
        (sys.stdout if asked else sys.stderr).write(f"{USAGE}\n")
        return 0 if asked else 2
    try:
        written = write_app(Path(arguments[0]))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("".join(f"{path}\n" for path in written))
    sys.stdout.write(f"Try it out: cd {arguments[0]} && python simulate.py. README.md has all commands.\n")
    return 0
