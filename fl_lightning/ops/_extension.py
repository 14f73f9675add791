# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled kernels, where there are any."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from dataclasses import dataclass
from types import ModuleType

import torch

_NAME = "fl_lightning._C"
_TORCH = (2, 10)  # as in setup.py
_INSTRUCTION_SETS = ("avx512", "avx2", "base")  # as in csrc/cpu/simd/dispatch.h
_SWITCHES = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
    "": False,
}


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
    """Imports the extension, which registers its kernels; warns if there is one that does not load.

    Raises:
        ValueError: FL_LIGHTNING_ISA or FL_LIGHTNING_DISABLE_EXT has a value that means nothing.
    """
    asked = os.environ.get("FL_LIGHTNING_ISA", "")
    if asked not in ("", *_INSTRUCTION_SETS):
        raise ValueError(f"FL_LIGHTNING_ISA must be one of {', '.join(_INSTRUCTION_SETS)}, found {asked!r}")
    if _switched_on("FL_LIGHTNING_DISABLE_EXT"):
        return Extension(None, f"switched off by FL_LIGHTNING_DISABLE_EXT={os.environ['FL_LIGHTNING_DISABLE_EXT']}")
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


def _switched_on(name: str) -> bool:
    """Whether an environment variable is set to 1, true, yes or on; not at all is off."""
    value = os.environ.get(name, "")
    if value.lower() not in _SWITCHES:
        raise ValueError(f"{name} must be one of {', '.join(filter(None, _SWITCHES))}, found {value!r}")
    return _SWITCHES[value.lower()]


def _why_not_built() -> str:
    if sys.platform != "linux":
        return f"compiled kernels are for Linux, this is {sys.platform}"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _TORCH:
        return f"compiled kernels need torch {_TORCH[0]}.{_TORCH[1]}, this is {torch.__version__}"
    return "installed without compiled kernels (see Install in the README: --no-build-isolation, a C++ compiler)"
