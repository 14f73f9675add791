# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that survive being interrupted while they are written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fl_lightning.arguments import checked
from fl_lightning.core.lightning.names import lightning_module, rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch.plugins.io import TorchCheckpointIO
else:
    TorchCheckpointIO = lightning_module("plugins.io").TorchCheckpointIO
STATE_KEY = "fl_lightning"
"""Names the federated state among the callbacks' states of a checkpoint."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes local checkpoints beside their name, flushes them to disk, and renames them into place.

    If the process is killed while it saves, the previous file of that name stays intact. The unfinished file is named
    ``*.ckpt.part``, and the next save under that name overwrites it. Lightning itself writes remote paths.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Saves ``checkpoint`` at ``path``."""
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.part")
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


@checked()
def newest_checkpoint(directory: str | Path, weights_only: bool = True) -> Path | None:
    """The newest checkpoint below ``directory`` from which a federated fit can go on, or ``None``.

    Files that do not load (cut short by a kill or a full disk) or hold no federated fit (``save_weights_only``, other
    trainers) are skipped with a warning.

    Args:
        directory: searched recursively for ``*.ckpt``.
        weights_only: how to load them, as in ``trainer.fit(ckpt_path=..., weights_only=...)``: checkpoints with
            hyperparameters of other than plain types need ``False``, which is for files that you trust.
    """
    for file in _newest_first(Path(directory).rglob("*.ckpt")):
        try:
            content = torch.load(file, map_location="cpu", weights_only=weights_only)
        except Exception as error:  # whatever a damaged file raises, an older one may still be good
            rank_zero_warn(f"skipping checkpoint {file}: it does not load ({type(error).__name__}: {error})")
            continue
        if isinstance(content, Mapping) and STATE_KEY in content.get("callbacks", {}):
            return file
        rank_zero_warn(f"skipping checkpoint {file}: it holds no federated fit")
    return None


def _newest_first(files: Iterable[Path]) -> list[Path]:
    dated = []
    for file in files:
        with suppress(OSError):  # a link to a file that is gone
            dated.append((file.stat().st_mtime_ns, file.name, file))
    return [file for *_, file in sorted(dated, reverse=True)]
