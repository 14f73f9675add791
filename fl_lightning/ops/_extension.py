# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled kernels, where there are any."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

_NAME = "fl_lightning._C"
_TORCH = (2, 10)  # as in setup.py
_RECORD = Path(__file__).parents[1] / "_built.txt"  # what setup.py leaves


@dataclass(frozen=True)
class Extension:
    """The compiled extension of this process.

    Attributes:
        module: ``fl_lightning._C``, or None.
        reason: why there is none.
    """

    module: ModuleType | None
    reason: str


def load() -> Extension:
    """Imports the extension, which registers its kernels; warns if there is one that does not load."""
    if os.environ.get("FL_LIGHTNING_DISABLE_EXT") == "1":
        return Extension(None, "switched off by FL_LIGHTNING_DISABLE_EXT=1")
    try:
        return Extension(importlib.import_module(_NAME), "")
    except ModuleNotFoundError as error:
        if error.name != _NAME:
            raise
        return Extension(None, _why_not_built())
    except (ImportError, OSError) as error:
        warnings.warn(
            f"the compiled kernels of fl_lightning do not load, so pure torch runs: {error}. They were built for "
            "another torch, or are damaged; installing fl_lightning again builds them anew.",
            RuntimeWarning,
            stacklevel=2,
        )
        return Extension(None, f"the compiled extension does not load: {error}")


def built() -> str:
    """What the build of this installation left out and why, in its own words; empty where it left no word."""
    try:
        text = _RECORD.read_text(encoding="utf-8")
    except OSError:
        return ""
    return " ".join(text.split())


def _why_not_built() -> str:
    if sys.platform != "linux":
        return f"compiled kernels are for Linux, this is {sys.platform}"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _TORCH:
        return f"compiled kernels need torch {_TORCH[0]}.{_TORCH[1]}, this is {torch.__version__}"
    kind, _, cause = built().partition("pure torch: ")
    if kind or not cause:  # of an earlier version, or the kernels were deleted since
        return "installed without compiled kernels (see Install in the README: --no-build-isolation, a C++ compiler)"
    return f"installed without compiled kernels: {cause}"
