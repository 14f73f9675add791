# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled kernels, where there are any."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
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
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Extension:
    """The compiled extensions of this process."""

    module: ModuleType | None  # fl_lightning._C with the kernels for the processor
    reason: str  # why there is none
    cuda: bool = False  # those for CUDA are loaded, too
    no_cuda: str = ""  # why they are not


def load() -> Extension:
    """Imports the extensions, which registers their kernels; warns if there is one that does not load."""
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
    if unsuitable := _unsuitable():
        return unsuitable
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


def _unsuitable() -> str:
    """One sentence if the CUDA kernels were built for none of this machine's GPUs."""
    _, _, architectures = built().partition("and for CUDA ")
    found, every = _capabilities(), re.findall(r"(\d+)\.(\d)([af]?)(\+PTX)?", architectures)
    if not found or not every or any(_runs_on(capability, *one) for capability in found for one in every):
        return ""
    own = ", ".join(f"{major}.{minor}" for major, minor in sorted(set(found)))
    return f"the CUDA kernels were built for compute capability {architectures}, and GPUs here have {own}"


def _runs_on(capability: tuple[int, int], major: str, minor: str, only: str, ptx: str) -> bool:
    """Whether a GPU runs code for one entry of TORCH_CUDA_ARCH_LIST: of its own major capability, or of PTX."""
    built_for = (int(major), int(minor))
    if only == "a":
        return capability == built_for
    return capability >= built_for and (bool(ptx) or capability[0] == built_for[0])


def _capabilities() -> list[tuple[int, int]]:
    """Those of this machine's GPUs, asked of the driver: a process that asks CUDA cannot be copied afterwards."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    count, found = ctypes.c_uint(), []
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    for index in range(count.value):
        device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
            continue
        if not nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)):
            found.append((major.value, minor.value))
    return found


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
    if value.lower() not in _ON + _OFF:
        raise ValueError(f"{name} must be one of {', '.join(filter(None, _ON + _OFF))}, found {value!r}")
    return value.lower() in _ON


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
