# SPDX-License-Identifier: Apache-2.0
"""A text with natural clients that every machine has: Python's standard library, one module or package per client.

The task is that of a code editor which many teams train together: the next character from those before it. Modules
differ in size, in what they are about and in the habits of their authors. Some are tables rather than prose.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.papers.sources import MissingDataError

CONTEXT, CHARACTERS = 16, 97
"""Characters that are seen, and classes: a new line, the 95 of ASCII that can be printed, all others."""

SMALLEST, LARGEST = 40_000, 120_000
"""Bytes: smaller modules are left out, of larger ones the beginning is taken."""

VERSION = "CPython 3.11.7"
DIGEST = "9d38821bcdcfae7bfa19b7ca27cb8edc951bb5270b58cc8fba5bbeece9157be8"
GENERAL_DIGEST = "810135bd6fae65254d61d740573e722b2ca81a68bc53c376a42591d3735b5ea1"
"""SHA-256 of all clients' texts, and of the text of the others."""

_NOT_THEIRS = ("test", "tests", "idle_test", "site-packages", "__pycache__")


def library(root: Path) -> dict[str, bytes]:
    """All modules and packages of the standard library by name, in the order of names.

    Args:
        root: a folder with ``stdlib``, a copy of the standard library; without it the running interpreter's is read.
    """
    copy = root / "stdlib"
    folder = copy if copy.is_dir() else Path(sysconfig.get_path("stdlib"))
    parts: defaultdict[str, list[bytes]] = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if not set(inside.parts) & set(_NOT_THEIRS) and not inside.name.startswith("_sysconfigdata"):
            parts[inside.parts[0].removesuffix(".py")].append(path.read_bytes())
    return {name: b"".join(parts[name]) for name in sorted(parts)}


def corpus(root: Path) -> dict[str, bytes]:
    """The clients' texts by name, in the order of names.

    Args:
        root: as for :func:`library`.

    Raises:
        MissingDataError: it is that of another version.
    """
    texts = {name: text[:LARGEST] for name, text in library(root).items() if len(text) >= SMALLEST}
    found = hashlib.sha256(b"".join(texts.values())).hexdigest()
    if found != DIGEST:
        raise MissingDataError(
            f"the standard library of {VERSION} is needed: run with that interpreter, or --data-root must be a folder "
            f"that holds a copy of it as stdlib, found another one with {len(texts)} large modules"
        )
    return texts


def general() -> bytes:
    """The text of all modules of the running interpreter that are too small to be clients.

    Raises:
        MissingDataError: it is that of another version.
    """
    found = b"".join(text for text in library(Path()).values() if len(text) < SMALLEST)
    if hashlib.sha256(found).hexdigest() != GENERAL_DIGEST:
        raise MissingDataError(f"the standard library of {VERSION} is needed: run with that interpreter")
    return found


def symbols(text: bytes) -> Tensor:
    """``[n]`` the characters as classes."""
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    classes = torch.where((values >= 32) & (values < 127), values - 31, CHARACTERS - 1)
    classes[values == ord("\n")] = 0
    return classes


def windows(text: bytes) -> tuple[Tensor, Tensor]:
    """Contexts ``[n, CONTEXT]`` and the characters after them ``[n]``, as classes; no two windows overlap."""
    classes = symbols(text)
    count = len(classes) // (CONTEXT + 1)
    cut = classes[: count * (CONTEXT + 1)].view(count, CONTEXT + 1)
    return cut[:, :CONTEXT].contiguous(), cut[:, CONTEXT].contiguous()


def halves(text: bytes) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Windows to train with, and those of the last fifth to test with."""
    contexts, following = windows(text)
    cut = len(following) - len(following) // 5
    return (contexts[:cut], following[:cut]), (contexts[cut:], following[cut:])
