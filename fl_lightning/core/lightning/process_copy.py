# SPDX-License-Identifier: Apache-2.0
"""What the copy of a fit in another process must know of Lightning's counters, and whose metrics it must not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from fl_lightning.core.lightning.epoch_loop import FederatedEpochLoop
from fl_lightning.core.lightning.names import Trainer

_T = TypeVar("_T")


def progress_of(loop: FederatedEpochLoop) -> dict[str, Any]:
    """How far a fit is, for the loop's copy in another process; its clock follows from that."""
    return {
        "epochs": loop.trainer.fit_loop.epoch_progress.state_dict(),
        "batches": loop.batch_progress.state_dict(),
    }


def load_progress(loop: FederatedEpochLoop, state: Mapping[str, Any]) -> None:
    """Brings a copy of the loop to where :func:`progress_of` was called."""
    loop.trainer.fit_loop.epoch_progress.load_state_dict(state["epochs"])
    loop.batch_progress.load_state_dict(state["batches"])


@contextmanager
def replaced_metrics(trainer: Trainer, wrap: Callable[[dict[str, Any]], _T]) -> Iterator[list[_T]]:
    """Puts others in the places of the trainer's dictionaries of metrics, and gives them."""
    connector, found = trainer._logger_connector, {}
    for name in ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics"):
        found[name] = getattr(connector, name)
        setattr(connector, name, wrap(found[name]))
    try:
        yield [getattr(connector, name) for name in found]
    finally:
        for name, metrics in found.items():
            setattr(connector, name, metrics)
