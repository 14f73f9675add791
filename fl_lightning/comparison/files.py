# SPDX-License-Identifier: Apache-2.0
"""The folder of a comparison: files that are there as a whole or not at all, all of one configuration."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_lightning.core.storage.files import write_text
from fl_lightning.report import FitRecord, record_from_json, record_to_json

_PATIENCE = 3.0
"""Seconds: the processes of a command that was killed end a moment later."""
_SHOWN = 6


def write_run(path: Path, record: FitRecord) -> None:
    """Writes what a finished run leaves."""
    write_text(path, f"{record_to_json(record)}\n")


def read_run(path: Path) -> FitRecord | None:
    """What :func:`write_run` wrote, or ``None`` if there is no such file."""
    if not path.exists():
        return None
    try:
        return record_from_json(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} must be the record of a fit ({error}): if a comparison wrote it, delete it, and compare again"
        ) from error


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Keeps other commands out of a folder; where the system has no such locks, nothing does."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / "lock").open("w") as file:
        last = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > last:
                    raise RuntimeError(f"another comparison is at work in {folder}") from None
                time.sleep(0.1)
        yield


def check_configuration(folder: Path, configuration: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses to mix runs of different configurations; parts that are new are added."""
    file, new = folder / "configuration.json", json.loads(json.dumps(configuration))
    try:
        old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except ValueError as error:
        raise ValueError(f"{file} cannot be read ({error}): take another folder, or delete this one") from error
    changed = [
        f"{name} of {part} was {before} and is {now}"
        for part in new.keys() & old.keys()
        for name in {**old[part], **new[part]}
        if (before := _entry(old[part], name)) != (now := _entry(new[part], name))
    ]
    if changed:
        more = f", and {len(changed) - _SHOWN} more entries" if len(changed) > _SHOWN else ""
        raise ValueError(
            f"{folder} holds runs of another configuration: {', '.join(sorted(changed)[:_SHOWN])}{more}. Take another "
            "folder, or delete this one"
        )
    write_text(file, json.dumps({**old, **new}, indent=1, sort_keys=True))


def _entry(entries: Mapping[str, Any], name: str) -> str:
    return str(entries[name]) if name in entries else "not given"
