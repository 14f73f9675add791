# SPDX-License-Identifier: Apache-2.0
"""Sends what a run prints to a file."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any


@contextmanager
def quiet(path: Path) -> Iterator[None]:
    """While this lasts, prints, warnings and log messages of this process are added to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    screens = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in tuple(logging.root.manager.loggerDict))]
    handlers: list[logging.StreamHandler[Any]] = [
        handler
        for logger in loggers
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream in screens
    ]
    with path.open("a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        streams = [handler.setStream(file) for handler in handlers]
        try:
            yield
        finally:
            for handler, stream in zip(handlers, streams, strict=True):
                if stream is not None:
                    handler.setStream(stream)


@contextmanager
def without_remarks() -> Iterator[None]:
    """While this lasts, what Lightning has to remark is not shown; warnings and errors are."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
