# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that survive being interrupted while they are written, and are checked when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fl_lightning.arguments import checked
from fl_lightning.core.storage.files import read_whole, write_whole
from fl_lightning.core.tensors import not_finite
from fl_lightning.lightning.names import lightning_module, rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch.plugins.io import TorchCheckpointIO
else:
    TorchCheckpointIO = lightning_module("plugins.io").TorchCheckpointIO

STATE_KEY = "fl_lightning"
"""Names the federated state among the callbacks' states of a checkpoint."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes local checkpoints beside their name, flushes them to disk, and renames them into place.

    If the process is killed while it saves, the previous file of that name stays intact. The unfinished file is named
    ``*.ckpt.part``, and the next save under that name overwrites it. Every part of a file has a checksum, which is
    compared when the file is read. Lightning itself writes and reads remote paths.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Saves ``checkpoint`` at ``path``; the error of a failure names the file."""
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        write_whole(Path(path), checkpoint)

    def load_checkpoint(self, path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        """Reads what was saved at ``path``, if it is whole; arguments are those of Lightning's class."""
        read = partial(super().load_checkpoint, path, *args, **options)
        if "://" in str(path) or not Path(path).is_file():
            return read()
        checkpoint: dict[str, Any] = read_whole(Path(path), read, remedy(path))
        return checkpoint


def federated_state(checkpoint: Any) -> dict[str, Any]:
    """What a checkpoint holds of a federated fit; empty if it holds none, or is none."""
    callbacks = checkpoint.get("callbacks", {}) if isinstance(checkpoint, Mapping) else {}
    state: dict[str, Any] = callbacks.get(STATE_KEY, {})
    return state


def remedy(path: str | Path) -> str:
    """What to do about a checkpoint that is of no use, as the end of a sentence."""
    return f"fl.newest_checkpoint({str(Path(path).parent)!r}) finds the newest one there that can be used"


def weights_not_finite(checkpoint: Mapping[str, Any]) -> list[str]:
    """Names of the trained parameters in a checkpoint of a federated fit that hold NaN or infinity."""
    layout = checkpoint["callbacks"][STATE_KEY].get("fit", {}).get("layout", {})
    names = [entry.rpartition(" [")[0] for entry in layout.get("parameters", ())]
    held = checkpoint.get("state_dict", {})
    return not_finite({name: held[name] for name in names if isinstance(held.get(name), Tensor)})


def check_resumable(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Raises ValueError if a checkpoint is not of a federated fit, or holds weights that are not finite."""
    if STATE_KEY not in checkpoint.get("callbacks", {}):
        raise ValueError(
            f"ckpt_path must be a checkpoint of a federated fit, found {path}: "
            "to start from its weights, load them with load_from_checkpoint"
        )
    broken = weights_not_finite(checkpoint)
    if broken:
        raise ValueError(
            f"the checkpoint {path} holds weights that are not finite, in {', '.join(broken)}: {remedy(path)}"
        )


@checked()
def newest_checkpoint(directory: str | Path, weights_only: bool = True) -> Path | None:
    """The newest checkpoint below ``directory`` from which a federated fit can go on, or ``None``.

    Files that do not load (cut short by a kill or a full disk, or changed since), hold no federated fit
    (``save_weights_only``, other trainers), or hold weights that are not finite are skipped with a warning.

    Args:
        directory: searched recursively for ``*.ckpt``.
        weights_only: how to load them, as in ``trainer.fit(ckpt_path=..., weights_only=...)``: checkpoints with
            hyperparameters of other than plain types need ``False``, which is for files that you trust.
    """
    for file in _newest_first(Path(directory).rglob("*.ckpt")):
        try:
            load = partial(torch.load, file, map_location="cpu", weights_only=weights_only)
            content = read_whole(file, load, "an older one may be whole")
        except Exception as error:  # whatever a damaged file raises, an older one may still be good
            rank_zero_warn(f"skipping checkpoint {file}: it does not load ({type(error).__name__}: {error})")
            continue
        if not isinstance(content, Mapping) or STATE_KEY not in content.get("callbacks", {}):
            rank_zero_warn(f"skipping checkpoint {file}: it holds no federated fit")
        elif weights_not_finite(content):
            rank_zero_warn(f"skipping checkpoint {file}: its weights are not finite")
        else:
            return file
    return None


def _newest_first(files: Iterable[Path]) -> list[Path]:
    dated = []
    for file in files:
        with suppress(OSError):  # a link to a file that is gone
            dated.append((file.stat().st_mtime_ns, file.name, file))
    return [file for *_, file in sorted(dated, reverse=True)]
