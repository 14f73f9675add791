# SPDX-License-Identifier: Apache-2.0
"""``last.ckpt`` after a kill during the very last save."""

from __future__ import annotations

from pathlib import Path

from fl_lightning.core.storage.files import copy_whole
from fl_lightning.lightning.names import ModelCheckpoint, Trainer


def complete_last_checkpoints(trainer: Trainer) -> None:
    """Brings ``ModelCheckpoint(save_last=True)`` up to date where a resumed fit has nothing left to do.

    Lightning then calls no hooks and saves nothing. The checkpoint that the fit was resumed from is the last one, and
    ``last.ckpt`` becomes a copy of it if it is missing or older. An unfinished file beside it goes, too.
    """
    source = None if trainer.ckpt_path is None else Path(str(trainer.ckpt_path))
    if source is None or not source.is_file():
        return
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint) or not callback.save_last or "://" in str(callback.dirpath):
            continue
        named = callback.last_model_path or callback.format_checkpoint_name({}, callback.CHECKPOINT_NAME_LAST)
        last = Path(named)
        if last.is_symlink() or (last.exists() and last.stat().st_mtime_ns >= source.stat().st_mtime_ns):
            continue
        copy_whole(source, last)
        callback.last_model_path = named
