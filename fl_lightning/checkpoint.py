# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that survive being interrupted while they are written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fl_lightning._lightning import lightning_module, rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch.plugins.io import TorchCheckpointIO
else:
    TorchCheckpointIO = lightning_module("plugins.io").TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes local checkpoints beside their name, flushes them to disk, and renames them into place.

    A process killed while saving leaves the previous file of that name intact. Remote paths go Lightning's way.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Saves ``checkpoint`` at ``path``."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def newest_checkpoint(directory: str | Path) -> Path | None:
    """The newest checkpoint below ``directory`` that loads, or ``None``.

    Files that do not load (cut short by a kill or a full disk) are skipped with a warning.

    Args:
        directory: searched recursively for ``*.ckpt``.
    """
    files = sorted(Path(directory).rglob("*.ckpt"), key=lambda file: (file.stat().st_mtime_ns, file.name), reverse=True)
    for file in files:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a damaged file raises, an older one may still be good
            rank_zero_warn(f"skipping checkpoint {file}: it does not load ({type(error).__name__}: {error})")
            continue
        if isinstance(content, Mapping) and "state_dict" in content:
            return file
    return None
