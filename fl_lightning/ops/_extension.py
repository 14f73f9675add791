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

_NAME, _CUDA = "fl_lightning._C", "fl_lightning._C_cuda"
_TORCH = (2, 10)  # as in setup.py
_RECORD = Path(__file__).parents[1] / "_built.txt"  # what setup.py leaves
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
    """The compiled extensions of this process.

    Attributes:
        module: ``fl_lightning._C`` with the kernels for the processor, or None.
        reason: why there is none.
        cuda: whether those for CUDA are loaded, too.
        no_cuda: why they are not.
    """

    module: ModuleType | None
    reason: str
    cuda: bool = False
    no_cuda: str = ""


def load() -> Extension:
    """Imports the extensions, which registers their kernels; warns if there is one that does not load.

    Raises:
        ValueError: FL_LIGHTNING_ISA or FL_LIGHTNING_DISABLE_EXT has a value that means nothing.
    """
    asked = os.environ.get("FL_LIGHTNING_ISA", "")
    if asked not in ("", *_INSTRUCTION_SETS):
        raise ValueError(f"FL_LIGHTNING_ISA must be one of {', '.join(_INSTRUCTION_SETS)}, found {asked!r}")
    if _switched_on("FL_LIGHTNING_DISABLE_EXT"):
        return Extension(None, f"switched off by FL_LIGHTNING_DISABLE_EXT={os.environ['FL_LIGHTNING_DISABLE_EXT']}")
    if sys.platform == "linux" and (old := _too_old()):  # pip installs wheels with kernels beside any torch
        return Extension(None, old)
    try:
        module = importlib.import_module(_NAME)
    except ModuleNotFoundError as error:
        if error.name != _NAME:
            raise
        return Extension(None, _why_not_built())
    except (ImportError, OSError) as error:
        _warn(f"the compiled kernels of fl_lightning do not load, so pure torch runs: {error}")
        return Extension(None, f"the compiled extension does not load: {error}")
    no_cuda = _load_cuda()
    return Extension(module, "", not no_cuda, no_cuda)


def _load_cuda() -> str:
    """Imports the extension for CUDA, if torch can use it; returns why not."""
    if torch.version.cuda is None:
        return "torch is a build without CUDA"
    try:
        importlib.import_module(_CUDA)
    except ModuleNotFoundError as error:
        if error.name != _CUDA:
            raise
        cause = built().partition("none for CUDA: ")[2]
        return f"the extension was built without CUDA kernels{f' ({cause})' if cause else ''}"
    except (ImportError, OSError) as error:
        _warn(f"the CUDA kernels of fl_lightning do not load, so pure torch runs on CUDA: {error}")
        return f"the CUDA kernels do not load: {error}"
    return ""


def _warn(problem: str) -> None:
    warnings.warn(
        f"{problem}. They were built for another torch, or are damaged; installing fl_lightning again builds them "
        "anew.",
        RuntimeWarning,
        stacklevel=3,
    )


def built() -> str:
    """What the build of this installation left out and why, in its own words; empty where it left no word."""
    try:
        text = _RECORD.read_text(encoding="utf-8")
    except OSError:
        return ""
    return " ".join(text.split())


def _switched_on(name: str) -> bool:
    """Whether an environment variable is set to 1, true, yes or on; not at all is off."""
    value = os.environ.get(name, "")
    if value.lower() not in _SWITCHES:
        raise ValueError(f"{name} must be one of {', '.join(filter(None, _SWITCHES))}, found {value!r}")
    return _SWITCHES[value.lower()]


def _too_old() -> str:
    """One sentence if this torch has no stable interface that the kernels can use."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _TORCH:
        return f"compiled kernels need torch {_TORCH[0]}.{_TORCH[1]}, this is {torch.__version__}"
    return ""


def _why_not_built() -> str:
    if sys.platform != "linux":
        return f"compiled kernels are for Linux, this is {sys.platform}"
    kind, _, cause = built().partition("pure torch: ")
    if kind or not cause:  # of an earlier version, or the kernels were deleted since
        return "installed without compiled kernels (see docs/install.md: --no-build-isolation, a C++ compiler)"
    return f"installed without compiled kernels: {cause}"
