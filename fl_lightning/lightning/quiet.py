# SPDX-License-Identifier: Apache-2.0
"""Trainers that say nothing of themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from fl_lightning.lightning.names import TREE


@contextmanager
def quiet() -> Iterator[None]:
    """Leaves out what trainers and fits log at the level INFO: devices, paths, that an epoch was the last."""
    logger = logging.getLogger(f"{TREE}.utilities.rank_zero")
    level = logger.level
    logger.setLevel(max(logging.WARNING, level))
    try:
        yield
    finally:
        logger.setLevel(level)
