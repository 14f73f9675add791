# SPDX-License-Identifier: Apache-2.0
"""Where the models of clients live: in memory and in the checkpoint, or in files that it refers to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_lightning.core.storage.model_files import ClientFiles
from fl_lightning.core.storage.models import ClientModels

ModelStore = ClientModels | ClientFiles


def model_store(directory: str | None, keep_checkpoints: int | None) -> ModelStore:
    """In files under ``directory``, see :class:`ClientFiles`; without one in memory on the CPU."""
    return ClientModels("cpu") if directory is None else ClientFiles(directory, keep_checkpoints)


def in_files(store: ModelStore) -> bool:
    """Whether the models live in files."""
    return isinstance(store, ClientFiles)


def restore(store: ModelStore, state: Mapping[str, Any], method: str) -> None:
    """Restores what ``state_dict`` of a store returned.

    Args:
        store: takes it.
        state: what was returned.
        method: the method's name, for errors.

    Raises:
        ValueError: that store kept models elsewhere than this one.
        FileNotFoundError: a file that the state refers to is gone.
    """
    if ("files" in state) != in_files(store):
        there = "itself: leave directory out" if in_files(store) else f"in files: give {method} the same directory"
        raise ValueError(f"the checkpoint has the personal models {there}")
    store.load_state_dict(state)


def restored(store: ModelStore, state: Mapping[str, Any], method: str) -> ModelStore:
    """Another store in the same place, with what the state has; ``store`` stays as it is.

    Raises:
        ValueError: the state is of a store elsewhere.
        FileNotFoundError: a file that it refers to is gone.
    """
    other = ClientFiles(store.directory) if isinstance(store, ClientFiles) else ClientModels("cpu")
    restore(other, state, method)
    return other
