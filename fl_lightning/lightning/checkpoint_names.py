# SPDX-License-Identifier: Apache-2.0
"""Names of checkpoints that hold the numbers of a round."""

from __future__ import annotations

import re
from typing import Any

from fl_lightning.lightning.names import ModelCheckpoint, Trainer

_GROUP = re.compile(r"\{([^{}:]+)(:[^{}]*)?\}")


def keep_names_in_one_folder(trainer: Trainer, prefix: str) -> None:
    """Lets patterns such as ``"{epoch}-{fed/val_acc/worst_5:.2f}"`` name files.

    Lightning writes the name of a number before its value (``auto_insert_metric_name``), and the slashes in it would
    make folders. Names that begin with ``prefix`` are written with ``_`` in the place of ``/``. All others are written
    as ever.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, ModelCheckpoint) or not callback.auto_insert_metric_name:
            continue
        patterns = {"filename": callback.filename, "CHECKPOINT_NAME_LAST": callback.CHECKPOINT_NAME_LAST}
        if not any(name.startswith(prefix) for p in patterns.values() for name, _ in _GROUP.findall(p or "")):
            continue
        callback.auto_insert_metric_name = False
        for attribute, pattern in patterns.items():
            setattr(callback, attribute, _spelled_out(callback, pattern, prefix))


def _spelled_out(callback: Any, pattern: str | None, prefix: str) -> str | None:
    def spell(found: re.Match[str]) -> str:
        name = found[1]
        shown = name.replace("/", "_") if name.startswith(prefix) else name
        return f"{shown}{callback.CHECKPOINT_EQUALS_CHAR}{found[0]}"

    return None if pattern is None else _GROUP.sub(spell, pattern)
