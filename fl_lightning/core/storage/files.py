# SPDX-License-Identifier: Apache-2.0
"""Files that are there as a whole or not at all and say when they are damaged."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

_ZIP = b"PK\x03\x04"
_FOLDER = 0x10  # an attribute that no checksum covers, and for which torch reads nothing into a tensor's memory


def write_whole(path: Path, content: object, private: bool = False) -> None:
    """Writes a file with ``torch.save``, checksums included, flushed to disk before it gets its name.

    If the process is killed meanwhile, a file of that name stays as it was. The unfinished one is named ``*.part``. A
    ``private`` file, and the folders that are made for it, are for their owner only.
    """
    checksums = torch.serialization.get_crc32_options()

    def save(file: BinaryIO) -> None:
        torch.serialization.set_crc32_options(True)
        try:
            torch.save(content, file)
        finally:
            torch.serialization.set_crc32_options(checksums)

    _write(path, save, private)


def write_text(path: Path, text: str) -> None:
    """Writes a text as :func:`write_whole` writes a file."""
    _write(path, lambda file: file.write(text.encode()), private=False)


def _write(path: Path, fill: Callable[[BinaryIO], object], private: bool) -> None:
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700 if private else 0o777, exist_ok=True)
    partial, mode = path.with_name(f"{path.name}{_own()}.part"), 0o600 if private else 0o666
    partial.unlink(missing_ok=True)  # of a process that was killed, perhaps with other rights
    try:
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _flush_names(path.parent)
    except Exception as error:
        # The writer of torch covers up what the file system said with an error of its own.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        found = "a file of this name is as it was before" if path.exists() else "no file of this name was made"
        advice = f"{cause.strerror or cause}; {found}: make room or save elsewhere"
        raise OSError(cause.errno, advice, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def _own() -> str:
    """What tells this process's unfinished files from those of other ranks, which may write the same file."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return f".{rank}" if rank else ""


def read_whole(path: Path, load: Callable[[], Any], remedy: str) -> Any:
    """Reads a file that :func:`write_whole` wrote, or ``torch.save``; says of a damaged one what is wrong with it."""
    flaw = _damage(path)
    if flaw is not None:
        raise ValueError(f"{path} is damaged, {flaw}: {remedy}")
    try:
        return load()
    except Exception as error:
        if "PytorchStreamReader" in str(error):
            raise ValueError(f"{path} is damaged ({error}): {remedy}") from error
        if zipfile.is_zipfile(path):
            raise  # nothing is wrong with the file
        raise ValueError(f"{path} is no file of torch.save ({type(error).__name__}: {error}): {remedy}") from error


def _damage(path: Path) -> str | None:
    """What is wrong with a file, by its checksums."""
    with path.open("rb") as file:
        start = file.read(len(_ZIP))
    if not start:
        return "it is empty"
    ends_well = zipfile.is_zipfile(path)
    if start != _ZIP:
        return "its first bytes are wrong" if ends_well else None
    if not ends_well:
        return "it is cut short"
    try:
        with zipfile.ZipFile(path) as file:
            entries = file.infolist()
            folders = [entry.filename for entry in entries if entry.external_attr & _FOLDER]
            if folders:
                return f"its part {folders[0]} is marked as a folder"
            if not any(entry.CRC for entry in entries):
                return None  # torch.serialization.set_crc32_options(False)
            broken = file.testzip()
    except Exception as error:  # of many kinds, as many as there are bytes to go wrong
        return f"{type(error).__name__}: {error}"
    return None if broken is None else f"the checksum of its part {broken} is wrong"


def _flush_names(folder: Path) -> None:
    """Flushes to disk that a file was renamed, where the file system knows how."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
