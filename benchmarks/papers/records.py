# SPDX-License-Identifier: Apache-2.0
"""Lines of the runs: one file per run while it goes on, one compressed file per experiment afterwards.

``NAME.jsonl.xz`` holds the lines of all runs of the experiment NAME, one run after the other; ``xzcat`` shows them. A
run writes to a file of its own in the folder ``NAME``. Where both have lines of a run, those that go further count.
"""

from __future__ import annotations

import fcntl
import json
import lzma
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Line = dict[str, Any]
"""One evaluation of one run: round, metrics, seconds, and where it comes from."""

Run = tuple[str, int]
"""Slug of the case, and the seed."""


def slug(name: str) -> str:
    """A file name."""
    return re.sub(r"[^a-z0-9.+]+", "-", name.lower()).strip("-")


def read(path: Path) -> list[Line]:
    """The lines of a file, if there is one; a last one that was cut off in the middle is left out."""
    try:
        with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
            text = file.read()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def replace(path: Path, content: bytes, scratch: Path) -> None:
    """Writes a file at once: a process that is killed leaves the old content or the new one."""
    scratch.write_bytes(content)
    scratch.replace(path)


def encode(lines: Iterable[Line]) -> bytes:
    """As they stand in a file."""
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def reached(lines: list[Line]) -> int:
    """Rounds that are recorded."""
    return int(lines[-1]["round"]) if lines else 0


def recorded(out: Path, experiment: str) -> dict[Run, list[Line]]:
    """The lines of all runs of an experiment."""
    # Files of single runs first: packing writes their lines to the compressed file before it deletes them.
    own = [read(path) for path in sorted((out / experiment).glob("*.jsonl"))]
    found: dict[Run, list[Line]] = {}
    for line in read(_packed(out, experiment)):
        found.setdefault(_run(line), []).append(line)
    for lines in filter(None, own):
        if reached(lines) >= reached(found.get(_run(lines[0]), [])):
            found[_run(lines[0])] = lines
    return found


def pack(out: Path, experiment: str) -> None:
    """Moves the lines of all runs to the compressed file; a run that a process is at keeps its own file too."""
    folder = out / experiment
    if not any(folder.glob("*.jsonl")):
        return
    with claim(folder / "pack.lock", wait=True):
        runs = recorded(out, experiment)
        lines = (line for _, each in sorted(runs.items()) for line in each)
        content = lzma.compress(encode(lines), preset=6 | lzma.PRESET_EXTREME)
        replace(_packed(out, experiment), content, folder / "packed.new")
        for path in folder.glob("*.jsonl"):
            with claim(path.with_suffix(".lock")) as mine:
                own = read(path)
                if mine and (not own or encode(own) == encode(runs.get(_run(own[0]), []))):
                    path.unlink()


@contextmanager
def claim(path: Path, wait: bool = False) -> Iterator[bool]:
    """Holds a lock; false if another process holds it. The system takes it back from a process that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            mine = True
        except BlockingIOError:
            mine = False
        yield mine


def _packed(out: Path, experiment: str) -> Path:
    return out / f"{experiment}.jsonl.xz"


def _run(line: Line) -> Run:
    return slug(line["case"]), line["seed"]
