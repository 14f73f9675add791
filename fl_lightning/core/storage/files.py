# SPDX-License-Identifier: Apache-2.0
"""Files of clients and rounds, which are there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def client_file(directory: Path, client_id: int, when: int) -> Path:
    """Where what a client has of a round lies: ``<directory>/client-<id>/round-<when>.pt``."""
    return directory / f"client-{client_id:06d}" / f"round-{when:06d}.pt"


def write_whole(path: Path, content: object) -> None:
    """Writes a file with ``torch.save``, flushed to disk before it gets its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.part")
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
